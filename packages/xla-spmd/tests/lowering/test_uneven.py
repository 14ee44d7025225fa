"""Dimensions that the mesh does not divide: values, parts, training, checkpoints, against what the CPU gives."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import all_programs
from xla_core.extension_api.tensors import send_cpu_data_to_device
from xla_spmd.reports import program_report
from xla_spmd.sharding.hlo_sharding import parse

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
spec_of = torch_xla._XLAC._get_xla_sharding_spec


def marked(values, mesh, spec):
    return xs.mark_sharding(values.to("xla"), mesh, spec).global_tensor


def last_program():
    return all_programs()[-1].executable


def test_shards_are_padded_and_say_what_is_theirs():
    """As torch_xla 2.9 gives them: zeros behind the elements, and ``unpadded_data`` without these."""
    line = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
    tensor = marked(torch.arange(5.0), line, ("data",))
    shards = xs.wrap_if_sharded(tensor).local_shards[::2]
    assert [s.data.tolist() for s in shards] == [[0, 1], [2, 3], [4, 0], [0, 0]]
    assert [s.unpadded_data.tolist() for s in shards] == [[0, 1], [2, 3], [4], []]
    assert [s.indices for s in shards] == [
        [slice(0, 2, 1)], [slice(2, 4, 1)], [slice(4, 5, 1)], [slice(5, 5, 1)],
    ]  # fmt: skip
    assert [s.replica_id for s in xs.wrap_if_sharded(tensor).local_shards] == [0, 1] * 4
    assert spec_of(tensor) == line.get_op_sharding(("data",)).text
    assert tensor.cpu().tolist() == [0, 1, 2, 3, 4]


CASES = [
    ((5, 3), ("data", None)),
    ((1, 7), ("data", "model")),
    ((9, 1), (("data", "model"), None)),
    ((3, 10), ("model", "data")),
]


@pytest.mark.parametrize(("shape", "spec"), CASES, ids=str)
def test_what_is_computed_of_them(mesh, shape, spec):
    """What lies behind the end is in no sum, norm, maximum, softmax, sort or product."""
    host = torch.randn(shape) - 3  # negative: a zero would be the maximum
    tensor = marked(host, mesh, spec)
    # the exponential of a zero is none: padding is not hidden by being zero
    values = ((host, host.exp()), (tensor, tensor.exp()))
    wanted, found = ([f(a) for f in FUNCTIONS.values() for a in pair] for pair in values)
    torch_xla.sync()
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        name = list(FUNCTIONS)[number // 2]
        torch.testing.assert_close(
            a.cpu(), b, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(tensor.cpu(), host, rtol=0, atol=0)


FUNCTIONS = {
    "sum": lambda a: torch.cat([a.sum(0), a.sum(1), a.sum().reshape(1), a.prod(0)]),
    "mean": lambda a: torch.stack([a.mean(), a.var(unbiased=False), a.norm()]),
    "extremes": lambda a: torch.cat([a.amax(0), a.amin(1), a.max().reshape(1)]),
    "places": lambda a: torch.cat([a.argmax(0), a.argmin(1)]),
    "softmax": lambda a: torch.cat([a.softmax(0), a.log_softmax(1)]),
    "scans": lambda a: torch.cat([a.cumsum(0), a.cumprod(1)]),
    "order": lambda a: torch.cat([a.sort(0)[0], a.flip(0), a.roll(1, 1)]),
    "product": lambda a: a @ a.t(),
    "shape": lambda a: torch.cat([a.reshape(-1), a.t().reshape(-1), a[1:].reshape(-1)]),
    "logic": lambda a: torch.stack([(a == 0).any(), (a != 0).all()]),
}


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_and_meshes(seed):
    """Operands and results of all kinds of divisions, with gradients, in one step."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = draw.choice([(8,), (4, 2), (2, 2, 2)])
    grid = xs.Mesh(np.random.RandomState(seed).permutation(8), shapes, "abc"[: len(shapes)])
    sizes = [draw.choice([1, 2, 3, 5, 6, 7, 9, 11, 13]) for _ in range(4)]
    host = [torch.randn(sizes[i], sizes[i + 1], generator=generator) for i in range(3)]
    tensors = [t.to("xla") for t in host]
    for t in tensors:
        xs.mark_sharding(t, grid, _drawn(draw, grid))
    both = [[t.requires_grad_() for t in values] for values in (host, tensors)]
    results = []
    for a, b, c in both:
        hidden = (a @ b).cos()
        if a is tensors[0]:
            xs.mark_sharding(hidden, grid, _drawn(draw, grid))
        out = torch.nn.functional.layer_norm(hidden @ c, [sizes[3]])
        loss = (out.softmax(0) * hidden.sum()).sum() + out[1:].square().sum() + b[::2].sum()
        loss.backward()
        results.append(out)
    torch_xla.sync()
    for a, b in [tuple(results), *((x.grad, y.grad) for x, y in zip(*both, strict=True))]:
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=2e-4, atol=2e-4)


def _drawn(draw, grid):
    """A random place for each of some axes of a mesh, of two dimensions."""
    spec = [(), ()]
    for axis in draw.sample(range(len(grid.mesh_shape)), len(grid.mesh_shape)):
        if draw.random() < 0.8:
            spec[draw.randrange(2)] += (axis,)
    return tuple(entry or None for entry in spec)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(13, 5), nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3)
    )


def train(module, batches, optimizer):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_with_a_last_batch_that_is_smaller(mesh, compile_count):
    """Parameters, gradients, moments and batches of uneven parts: losses of one device; memory is donated."""
    torch.manual_seed(1)
    batches = [(torch.randint(13, (n, 3)), torch.randint(3, (n, 3))) for n in (6, 6, 6, 6, 3)]
    host = model()
    split = copy.deepcopy(host).to("xla")
    for p in split.parameters():
        xs.mark_sharding(p, mesh, ("data", "model")[: p.dim()])
    wanted = train(host, batches, torch.optim.AdamW(host.parameters(), 1e-2))
    spec = xs.ShardingSpec(mesh, ("data", None))

    def uploaded():  # as MpDeviceLoader does, which is in the package xla-dist
        for batch in batches:
            yield xm.send_cpu_data_to_device(batch, xm.xla_device(), input_sharding=spec)
            torch_xla.sync()

    optimizer = torch.optim.AdamW(split.parameters(), 1e-2)
    counts = []
    loaded = ((counts.append(compile_count()), batch)[1] for batch in uploaded())
    assert train(split, loaded, optimizer) == pytest.approx(wanted, rel=1e-5)
    assert counts[3] == counts[2]  # the second step is like the third
    donating = max(all_programs(), key=lambda p: len(p.donated))
    assert donating.copied_donations == 0
    for (name, p), q in zip(split.named_parameters(), host.parameters(), strict=True):
        assert spec_of(p) == mesh.get_op_sharding(("data", "model")[: p.dim()]).text, name
        assert spec_of(optimizer.state[p]["exp_avg"]) == spec_of(p)
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)
    shares = program_report.parameter_shares(split, optimizer)
    parts = [4 * int(np.prod(parse(spec_of(p)).shard_shape(p.shape))) for p in split.parameters()]
    assert shares["parameters"] == dict.fromkeys(range(8), sum(parts))


def test_no_device_talks_to_another_about_padding(mesh):
    """A step of element-wise operators: no collective, memory of the parameter's own, and no copy of it."""
    tensor = marked(torch.ones(5, 1024), mesh, ("data", None))
    tensor.mul_(2).add_(1)
    torch_xla.sync()
    assert program_report.collectives(all_programs()[-1]) == []
    memory = last_program().memory_analysis()
    assert memory["aliased"] == 2 * 1024 * 4
    assert memory["arguments"] <= memory["aliased"] + 16  # the two numbers
    assert memory["temporaries"] <= 16
    total = tensor.sum()
    torch_xla.sync()
    assert [c.kind for c in program_report.collectives(all_programs()[-1])] == ["all-reduce"]
    assert total.item() == 5 * 1024 * 3


def test_clearing_and_marking_again(mesh):
    values = torch.arange(35.0).reshape(5, 7)
    tensor = marked(values, mesh, ("data", None))
    for spec in (("model", "data"), (None, ("data", "model")), ("data", "model")):
        xs.mark_sharding(tensor, mesh, spec)
        assert spec_of(tensor) == mesh.get_op_sharding(spec).text
        torch.testing.assert_close(tensor.cpu(), values)
    xs.clear_sharding(tensor)
    assert spec_of(tensor) == ""
    backend = runtime.trace_of("xla").backend
    assert {p.shape for _, p in backend.client.shards(tensor._s.buffer)} == {(5, 7)}
    tensor.add_(1)
    torch.testing.assert_close(tensor.cpu(), values + 1)


def test_writes_in_place_and_through_views(mesh):
    tensor, host = (
        marked(torch.arange(15.0).reshape(5, 3), mesh, ("data", None)),
        torch.arange(15.0).reshape(5, 3),
    )
    for t in (tensor, host):
        t[1:4] *= 2
        t.t()[0] = 7
        t[-1] += 1
        t.copy_(t.flip(0))
    torch_xla.sync()
    torch.testing.assert_close(tensor.cpu(), host)
    assert spec_of(tensor) == mesh.get_op_sharding(("data", None)).text


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_shards_are_loaded_back(mesh, padded):
    values = torch.arange(35.0).reshape(5, 7)
    target = xs.mark_sharding(torch.zeros(5, 7).to("xla"), mesh, ("data", "model"))
    shards = xs.mark_sharding(values.to("xla"), mesh, ("data", "model")).local_shards
    for shard in shards:
        shard.data = shard.data if padded else shard.unpadded_data
    target.load_local_shards_(shards)
    torch.testing.assert_close(target.cpu(), values)
    assert target.sum().item() == values.sum().item()
    shards[7].data = torch.zeros(1, 3)
    with pytest.raises(
        ValueError, match=r"shard 7 has shape \(1, 3\).*or \(0, 3\) without padding"
    ):
        target.load_local_shards_(shards)


def test_batches_of_the_host(mesh):
    """Whole, as one process's rows of it, and smaller than the axis."""
    for rows, minibatch in ((3, False), (1, False), (5, True)):
        spec = xs.ShardingSpec(mesh, ("data", None), minibatch=minibatch)
        values = torch.arange(rows * 2.0).reshape(rows, 2)
        sent = send_cpu_data_to_device(values, "xla", spec)
        assert spec_of(sent) == mesh.get_op_sharding(("data", None)).text
        torch.testing.assert_close((sent + 1).sum().cpu(), (values + 1).sum())
        torch.testing.assert_close(sent.cpu(), values)


@pytest.mark.parametrize("other", [("model", "data"), (None, ("model", "data")), None], ids=str)
def test_checkpoints_hold_the_elements_alone(mesh, tmp_path, other):
    """Written from one division of a tensor, read into another one, and by torch's own planner."""
    values = {"w": torch.randn(5, 7), "h": torch.randn(3, 2).bfloat16(), "one": torch.randn(1)}
    specs = {"w": ("data", "model"), "h": (("data", "model"), None), "one": ("data",)}
    state = {k: marked(v, mesh, specs[k]) for k, v in values.items()}
    dcp.save(state, checkpoint_id=str(tmp_path), planner=SPMDSavePlanner(), no_dist=True)
    chunks = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata["w"].chunks
    assert sum(c.sizes.numel() for c in chunks) == 35 and all(c.sizes.numel() for c in chunks)
    plain = {k: torch.zeros_like(v) for k, v in values.items()}
    dcp.load(plain, checkpoint_id=str(tmp_path), no_dist=True)
    again = {k: torch.zeros_like(v).to("xla") for k, v in values.items()}
    if other is not None:
        xs.mark_sharding(again["w"], mesh, other)
        xs.mark_sharding(again["h"], mesh, other)
        xs.mark_sharding(again["one"], mesh, ("model",))
    dcp.load(again, checkpoint_id=str(tmp_path), planner=SPMDLoadPlanner(), no_dist=True)
    for name, value in values.items():
        torch.testing.assert_close(plain[name], value, rtol=0, atol=0)
        torch.testing.assert_close(again[name].cpu(), value, rtol=0, atol=0)


def test_manual_sharding_sees_zeros_behind_the_end(mesh):
    tensor = marked(torch.arange(5.0) + 1, mesh, ("data",)).exp().requires_grad_()
    part = xs.enable_manual_sharding(tensor, ("data",), mesh=mesh)
    assert part.shape == (2,)
    whole = xs.disable_manual_sharding(part.global_tensor * 2, ("data",), (5,), mesh=mesh)
    torch.testing.assert_close(whole.detach().cpu(), (torch.arange(5.0) + 1).exp() * 2)
    sums = part.global_tensor.sum().reshape(1)
    sums = xs.disable_manual_sharding(sums, ("data",), (4,), mesh=mesh)
    wanted = torch.nn.functional.pad((torch.arange(5.0) + 1).exp(), (0, 3)).reshape(4, 2).sum(1)
    torch.testing.assert_close(sums.detach().cpu(), wanted)


def test_inside_a_compiled_function(mesh):
    def function(x):
        return xs.mark_sharding(x * 2, mesh, ("data", None), use_dynamo_custom_op=True).exp().sum(0)

    with torch.no_grad():
        result = torch.compile(function, backend="openxla", fullgraph=True)(
            torch.ones(5, 3).to("xla")
        )
    torch.testing.assert_close(result.cpu(), (torch.ones(5, 3) * 2).exp().sum(0))


def test_even_programs_stay_as_they_were(mesh):
    """Where everything divides, arguments and results are the values themselves."""
    tensor = marked(torch.ones(8, 4), mesh, ("data", "model"))
    text = xm.get_stablehlo([tensor * 2])
    assert "stablehlo.slice" not in text and "stablehlo.pad" not in text
