"""Functional collectives, device meshes and DTensors on ``xla``, each compared with gloo's on the CPU."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from dist_jobs import refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import randn as sharded_randn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_xla
import torch_xla.runtime as xr
from xla_core.support import counters


@contextlib.contextmanager
def on_the_device():
    """Nothing inside runs on the CPU, or warns of anything but torch's own plans."""
    before = set(counters.all_counters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # names change between releases of torch
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # Dynamo's
        yield
    fell_back = {
        n for n in set(counters.all_counters()) - before if n.startswith(("aten::", "_c10d"))
    }
    assert not fell_back, fell_back


def same(got, wanted):
    torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=1e-6, atol=1e-6)


# --- functional collectives ---------------------------------------------------------------------


def outcomes(x, group, size):
    """Every functional collective of ``x``, which has a multiple of ``size`` rows."""
    fc = functional_collectives
    operators = torch.ops._c10d_functional
    name = group.group_name
    for kind in ("sum", "avg", "product", "min", "max"):
        if kind != "avg" or not x.is_cpu:  # gloo has no mean
            yield f"all_reduce {kind}", fc.all_reduce(x, kind, group)
    yield "all_reduce_", operators.all_reduce_(x.clone(), "sum", name)
    yield from zip("ab", fc.all_reduce_coalesced([x, x[0] + 1], "sum", group), strict=True)
    yield "all_gather", fc.all_gather_tensor(x, 0, group)
    yield "all_gather 1", fc.all_gather_tensor(x, 1, group)
    number = x.sum()[None] if x.is_cpu else x.sum()  # gloo takes no tensor without dimensions
    yield "all_gather ()", fc.all_gather_tensor(number, 0, group)
    out = torch.zeros(len(x) * size, *x.shape[1:], device=x.device)
    yield "all_gather out", operators.all_gather_into_tensor_out(x, size, name, out=out)
    yield "out itself", out
    yield from zip("cd", fc.all_gather_into_tensor_coalesced([x, x[0]], group), strict=True)
    yield "reduce_scatter", fc.reduce_scatter_tensor(x, "sum", 0, group)
    yield "reduce_scatter 1", fc.reduce_scatter_tensor(x.t(), "sum", 1, group)
    (scattered,) = fc.reduce_scatter_tensor_coalesced([x], "sum", [0], group)
    yield "reduce_scatter_coalesced", scattered
    yield "all_to_all", fc.all_to_all_single(x, None, None, group)
    yield "broadcast", fc.broadcast(x, size - 1, group)
    yield "broadcast_", operators.broadcast_(x.clone(), 0, name)
    yield "wait", fc.wait_tensor(operators.all_reduce(x, "sum", name))


def gradients(x, group):
    """Of what torch differentiates: the gradient of a function of each collective."""
    fc = functional_collectives
    for name, function in (
        ("all_reduce", lambda x: fc.all_reduce(x, "sum", group)),
        ("all_gather", lambda x: fc.all_gather_tensor_autograd(x, 0, group)),
        ("reduce_scatter", lambda x: fc.reduce_scatter_tensor_autograd(x, "sum", 0, group)),
        ("all_to_all", lambda x: fc.all_to_all_single_autograd(x, None, None, group)),
    ):
        leaf = x.clone().requires_grad_()
        function(leaf * 2).square().sum().backward()
        yield name, leaf.grad


def agree_with_gloo(index):
    """Values and gradients, on the world and on the others than the first rank."""
    dist.init_process_group("xla", init_method="xla://")
    world = dist.get_world_size()
    groups = [list(range(world))] + ([list(range(1, world))] if world > 2 else [])
    for ranks in groups:
        on_xla, on_cpu = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
        if index not in ranks:
            continue
        size = len(ranks)
        x = torch.arange(6.0 * size).reshape(2 * size, 3) / 4 + index
        for function in (lambda x, g: outcomes(x, g, size), gradients):  # noqa: B023 - called at once
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # as in on_the_device
                wanted = dict(function(x, on_cpu))
            with on_the_device():
                got = dict(function(x.to("xla"), on_xla))
                torch_xla.sync()
            for name, value in wanted.items():
                same(got[name], value)
            if "all_reduce avg" in got:
                same(got["all_reduce avg"], wanted["all_reduce sum"] / size)
        if size == world:
            refused(ValueError, "gloo", torch.ops._c10d_functional.all_reduce, x.to("xla"), "sum",
                    on_cpu.group_name)  # fmt: skip
    refused(ValueError, "no reduction 'bxor'", functional_collectives.all_reduce,
            torch.ones(1, device="xla"), "bxor", dist.group.WORLD)  # fmt: skip
    return True


def uneven(index):
    """Slices of several sizes go through the host, and arrive."""
    dist.init_process_group("xla", init_method="xla://")
    sizes = [1, 2]
    mine = torch.arange(3.0) + 10 * index
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a fallback
        got = functional_collectives.all_to_all_single(
            mine.to("xla"), [sizes[index]] * 2, sizes, dist.group.WORLD
        )
    parts = [(torch.arange(3.0) + 10 * r).split(sizes)[index] for r in range(2)]
    same(got, torch.cat(parts))
    return True


def repeats(index):
    """One program, however often a step with collectives runs; the same under torch.compile."""
    mesh = init_device_mesh("xla", (xr.world_size(),))

    def step(x):
        part = functional_collectives.reduce_scatter_tensor(x * 2, "sum", 0, mesh)
        return functional_collectives.all_gather_tensor(part + 1, 0, mesh)

    compiled = torch.compile(step, backend="openxla")
    with on_the_device():
        for function in (step, compiled):
            found = []
            for turn in range(6):
                x = torch.full((4,), float(turn)).to("xla")
                got = function(x)
                torch_xla.sync()
                same(got, torch.full((4,), 2.0 * turn * xr.world_size() + 1))
                found.append(counters.all_counters()["UncachedCompile"])
            assert found[2:] == found[2:3] * 4, found
    return True


# --- meshes -------------------------------------------------------------------------------------


def meshes(index):
    """Meshes of one and two dimensions: who is where, and the groups of their dimensions."""
    world = xr.world_size()
    line = init_device_mesh("xla", (world,))
    assert dist.get_backend() == "xla" and dist.get_world_size() == world
    assert (line.device_type, line.get_coordinate(), line.ndim) == ("xla", (index,), 1)
    assert dist.get_process_group_ranks(line.get_group()) == list(range(world))
    one = torch.ones(2, device="xla") * (index + 1)
    with on_the_device():
        same(functional_collectives.all_reduce(one, "sum", line),
             torch.full((2,), world * (world + 1) / 2))  # fmt: skip
        same(DTensor.from_local(one, line, [Shard(0)]).full_tensor(),
             torch.arange(1.0, world + 1).repeat_interleave(2))  # fmt: skip
    refused(RuntimeError, "bigger than default world size", init_device_mesh, "xla", (world + 1,))
    if world == 4:
        grid = init_device_mesh("xla", (2, 2), mesh_dim_names=("data", "model"))
        data, model = divmod(index, 2)
        assert grid.get_coordinate() == (data, model)
        rows = dist.get_process_group_ranks(grid["model"].get_group())
        columns = dist.get_process_group_ranks(grid.get_group("data"))
        assert (rows, columns) == ([2 * data, 2 * data + 1], [model, model + 2])
        with on_the_device():
            value = torch.full((1,), float(index), device="xla")
            same(functional_collectives.all_reduce(value, "sum", grid["model"]),
                 torch.tensor([4.0 * data + 1]))  # fmt: skip
            same(functional_collectives.all_gather_tensor(value, 0, (grid, 0)),
                 torch.tensor([model, model + 2.0]))  # fmt: skip
            flat = grid["data", "model"]._flatten("all")
            same(functional_collectives.all_reduce(value, "max", flat), torch.tensor([3.0]))
    return True


# --- DTensors -----------------------------------------------------------------------------------

PLACEMENTS = {
    1: [[Shard(0)], [Shard(1)], [Replicate()]],
    2: [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)]],
}


def distributed_tensors(index):
    """The first process's values arrive in parts, move from placement to placement, and multiply."""
    world = xr.world_size()
    shapes = [(world,)] + ([(2, 2)] if world == 4 else [])
    whole = torch.arange(35.0).reshape(5, 7) / 7
    for shape in shapes:
        mesh = init_device_mesh("xla", shape)
        for before in PLACEMENTS[mesh.ndim]:
            made = distribute_tensor(whole + index, mesh, before)
            assert isinstance(made, DTensor) and made.device.type == "xla"
            same(made.full_tensor(), whole)
            for after in PLACEMENTS[mesh.ndim]:
                with on_the_device():
                    same(made.redistribute(placements=after).full_tensor(), whole)
            same((made @ made.t()).full_tensor(), whole @ whole.t())
            leaf = distribute_tensor(whole.clone().requires_grad_(), mesh, before)
            leaf.square().sum().backward()
            same(leaf.grad.full_tensor(), 2 * whole)
    partial = DTensor.from_local(torch.ones(2, device="xla"), mesh, [Partial()] * mesh.ndim)
    same(partial.full_tensor(), torch.full((2,), float(world)))
    refused(RuntimeError, "Shard(dimension) and Replicate()", distribute_tensor, whole, mesh,
            [Partial()] * mesh.ndim)  # fmt: skip
    refused(ValueError, "one for each", distribute_tensor, whole, mesh, [Shard(0)] * 3)
    refused(RuntimeError, "leaf", distribute_tensor, whole.clone().requires_grad_() * 2, mesh)
    return True


def random_numbers(index):
    """Shards differ, copies are equal, and a seed repeats them."""
    mesh = init_device_mesh("xla", (xr.world_size(),))
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        split = sharded_randn(4, 6, device_mesh=mesh, placements=[Shard(0)])
        copied = torch.rand_like(distribute_tensor(torch.zeros(3), mesh))
        found.append((split.full_tensor().cpu(), copied.to_local().cpu()))
    same(found[0][0], found[1][0])
    assert len(found[0][0].unique()) == 24
    everyone = functional_collectives.all_gather_tensor(found[0][1].to("xla"), 0, mesh)
    same(everyone, found[1][1].repeat(xr.world_size()))
    assert found[0][1].unique().numel() == 3
    return True


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def tensor_parallel(index):
    """torch's own tensor parallelism trains as one process does, in one program per step."""
    mesh = init_device_mesh("xla", (xr.world_size(),))
    alone, split = network(), network().to("xla")
    split = parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, split)]
    batch = torch.randn(10, 6)
    compiled = []
    for _ in range(5):
        losses = []
        for model, optimizer, device in zip(
            (alone, split), optimizers, ("cpu", "xla"), strict=True
        ):
            optimizer.zero_grad()
            losses.append(model(batch.to(device)).square().mean())
            losses[-1].backward()
            optimizer.step()
        torch_xla.sync()
        compiled.append(counters.all_counters()["UncachedCompile"])
        torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-5, atol=1e-6)
    assert compiled[2:] == compiled[2:3] * 3, compiled
    same(split[0].weight.full_tensor(), alone[0].weight)
    return True


def without_streams(index):
    """What torch has for devices with streams says so."""
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    mesh = init_device_mesh("xla", (xr.world_size(),))
    model = torch.nn.Linear(4, 4).to("xla")
    fully_shard(model, mesh=mesh)
    refused(AttributeError, "XlaFullyShardedDataParallel", model, torch.ones(2, 4, device="xla"))
    return True
