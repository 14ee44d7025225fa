"""mark_sharding and its kin: values, layouts, gradients, errors."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla._internal import custom_kernel
from torch_xla.distributed.spmd import api as spmd_api
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import all_programs
from xla_spmd.reports import program_report

spec_of = torch_xla._XLAC._get_xla_sharding_spec


def held(tensor):
    """Bytes of a tensor's value on each device."""
    backend = runtime.trace_of(tensor.device).backend
    return {
        device: int(np.prod(part.shape)) * part.dtype.itemsize
        for device, part in backend.client.shards(tensor._s.buffer)
    }


def test_the_process_shows_one_device():
    assert xr.is_spmd()
    assert torch_xla.devices() == [torch.device("xla:0")]
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == 8
    assert xr.global_device_count() == xr.addressable_device_count() == xr.world_size() == 1
    assert torch_xla.real_devices() == [f"CPU:{i}" for i in range(8)]
    assert xm.is_master_ordinal()
    xr.use_spmd()  # a second call changes nothing
    assert torch_xla.devices() == [torch.device("xla:0")]


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        (("data", "model"), 8),
        ((0, None), 4),
        ((None, "model"), 2),
        ((("data", "model"), None), 8),
        (((1, 0), None), 8),
        ((-1, None), 2),
        ((None, None), 1),
    ],
)
def test_values_survive_and_every_device_holds_its_part(mesh, spec, share):
    values = torch.arange(64.0).reshape(8, 8)
    tensor = values.to("xla")
    marked = xs.mark_sharding(tensor, mesh, spec)
    assert isinstance(marked, xs.XLAShardedTensor)
    assert marked.sharding_spec == spec_of(tensor) == mesh.get_op_sharding(spec).text
    torch.testing.assert_close(tensor.cpu(), values)
    torch.testing.assert_close((tensor @ tensor).cpu(), values @ values)
    assert set(held(tensor).values()) == {256 // share}


def test_an_annotated_upload_never_is_whole_on_a_device(mesh):
    gc.collect()
    before = xm.get_memory_info()["bytes_used"]
    tensor = torch.zeros(1024, 1024).to("xla")
    xs.mark_sharding(tensor, mesh, ("data", "model"))
    after = xm.get_memory_info()
    assert after["bytes_used"] - before == 4 * 1024 * 1024 // 8
    assert set(held(tensor).values()) == {4 * 1024 * 1024 // 8}


def test_a_pending_value_comes_annotated(mesh):
    tensor = torch.ones(8, 8, device="xla") * 3
    xs.mark_sharding(tensor, mesh, ("data", None))
    assert spec_of(tensor) == mesh.get_op_sharding(("data", None)).text
    torch_xla.sync()
    assert set(held(tensor).values()) == {64}
    assert tensor.cpu().eq(3).all()


def test_a_view_is_annotated_alone(mesh):
    base = torch.arange(64.0).reshape(8, 8).to("xla")
    view = base.t()
    assert xs.mark_sharding(view, mesh, ("data", None)).partition_spec == ("data", None)
    assert spec_of(base) == ""
    result = view * 2
    torch_xla.sync()
    assert set(held(result).values()) == {64}
    torch.testing.assert_close(result.cpu(), torch.arange(64.0).reshape(8, 8).t() * 2)


def test_annotating_an_operand_of_the_current_step_moves_it(mesh):
    tensor = torch.arange(8.0).to("xla")
    first = tensor + 1
    xs.mark_sharding(tensor, mesh, ("data",))
    second = tensor + 2
    torch_xla.sync()
    assert set(held(tensor).values()) == {8}
    torch.testing.assert_close((first + second).cpu(), torch.arange(8.0) * 2 + 3)


def test_a_second_annotation_replaces_the_first(mesh):
    tensor = torch.arange(64.0).reshape(8, 8).to("xla")
    xs.mark_sharding(tensor, mesh, ("data", None))
    xs.mark_sharding(tensor, mesh, (None, "data"))
    assert spec_of(tensor) == mesh.get_op_sharding((None, "data")).text
    (shard, *_) = xs.wrap_if_sharded(tensor).local_shards
    assert shard.data.shape == (8, 2)
    torch.testing.assert_close(tensor.cpu(), torch.arange(64.0).reshape(8, 8))


def test_clearing_makes_it_whole_again(mesh):
    tensor = torch.arange(64.0).reshape(8, 8).to("xla")
    marked = xs.mark_sharding(tensor, mesh, ("data", "model"))
    cleared = xs.clear_sharding(marked)
    assert not isinstance(cleared, xs.XLAShardedTensor)
    assert spec_of(tensor) == spec_of(cleared) == ""
    assert xs.wrap_if_sharded(tensor) is tensor
    assert set(held(tensor).values()) == {256}
    torch.testing.assert_close(cleared.cpu(), torch.arange(64.0).reshape(8, 8))
    xs.mark_sharding(tensor, mesh, ("data", None))
    assert spec_of(tensor) == mesh.get_op_sharding(("data", None)).text


def test_the_result_of_mark_sharding_has_the_gradient_history(mesh):
    leaf = torch.ones(8, 4, device="xla", requires_grad=True)
    marked = xs.mark_sharding(leaf, mesh, ("data", None))
    (marked * 3).sum().backward()
    assert leaf.grad.cpu().eq(3).all()
    with torch.no_grad():
        marked.add_(1)
    assert leaf.cpu().eq(2).all()


def test_gradients_are_annotated_too(mesh):
    leaf = torch.ones(8, 4, device="xla", requires_grad=True)
    inner = leaf * 2
    split = xs.mark_sharding_with_gradients(inner, mesh, ("data", None))
    inner.retain_grad()
    (split**2).sum().backward()
    assert spec_of(inner.grad) == spec_of(split) != ""  # also before the step has run
    torch_xla.sync()
    assert set(held(inner.grad).values()) == {32}
    assert leaf.grad.cpu().eq(8).all()


def test_marks_are_in_the_graphs_of_aot_autograd(mesh):
    graphs = []

    def marked(x):
        return xs.xla_sharding.MarkShardingFunction.apply(x * 2, mesh, ("data", None)) * 3

    def keep(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    leaf = torch.ones(8, 4, device="xla", requires_grad=True)
    result = aot_function(marked, fw_compiler=keep, bw_compiler=keep)(leaf)
    result.sum().backward()
    assert result.cpu().eq(6).all()
    assert leaf.grad.cpu().eq(6).all()
    for graph in graphs:
        targets = [str(node.target) for node in graph.graph.nodes]
        assert targets.count("xla_spmd.annotate.default") == 1
    assert len(graphs) == 2


def test_results_of_a_program_tell_how_they_lie(mesh):
    left = torch.ones(8, 8).to("xla")
    xs.mark_sharding(left, mesh, ("data", None))
    product = left @ torch.ones(8, 8, device="xla")
    total = product.sum()
    assert spec_of(product) == ""
    torch_xla.sync()
    assert spec_of(product) == mesh.get_op_sharding(("data", None)).text
    assert spec_of(total) == "{replicated}"


def test_a_permuted_mesh_and_another_beside_it():
    backwards = xs.Mesh(np.arange(8)[::-1], (4, 2), ("data", "model"))
    forwards = xs.Mesh(np.arange(8), (8,), ("data",))
    values = torch.arange(64.0).reshape(8, 8)
    one, two = values.to("xla"), values.to("xla")
    xs.mark_sharding(one, backwards, ("data", None))
    xs.mark_sharding(two, forwards, (None, "data"))
    torch.testing.assert_close((one @ two).cpu(), values @ values)
    torch.testing.assert_close((one @ one).cpu(), values @ values)
    first = xs.wrap_if_sharded(one).local_shards[7]
    torch.testing.assert_close(first.data, values[:2])


def test_dimensions_that_came_out_uneven_are_read_all_the_same(mesh):
    tensor = torch.arange(64.0).reshape(8, 8).to("xla")
    xs.mark_sharding(tensor, mesh, ("data", None))
    part = tensor[1:] * 2
    torch_xla.sync()
    torch.testing.assert_close(part.cpu(), torch.arange(64.0).reshape(8, 8)[1:] * 2)
    torch.testing.assert_close((part + 1).sum().cpu(), (torch.arange(8.0, 64.0) * 2 + 1).sum())


def test_random_numbers_do_not_depend_on_the_split(mesh):
    torch_xla.manual_seed(3)
    whole = torch.randn(8, 8, device="xla").cpu()
    torch_xla.manual_seed(3)
    split = torch.randn(8, 8, device="xla")
    xs.mark_sharding(split, mesh, ("data", "model"))
    torch.testing.assert_close(split.cpu(), whole)


MISTAKES = {
    "rank": (
        lambda m: xs.mark_sharding(_tensor(), m, ("data",)),
        r"length \(1\).*\('data', None\)",
    ),
    "name": (lambda m: xs.mark_sharding(_tensor(), m, ("Data", None)), "did you mean 'data'"),
    "index": (lambda m: xs.mark_sharding(_tensor(), m, (2, None)), "not one of the mesh's 2 axes"),
    "kind": (lambda m: xs.mark_sharding(_tensor(), m, (1.5, None)), "is not a mesh axis"),
    "twice": (lambda m: xs.mark_sharding(_tensor(), m, ("data", 0)), "occurs twice"),
    "cpu": (
        lambda m: xs.mark_sharding(torch.ones(8), m, (0,)),
        "Expected XLA tensor. Got: torch.Fl",
    ),
    "devices": (
        lambda m: xs.mark_sharding(_tensor(), xs.Mesh(range(4), (4,)), (0, None)),
        "is over 4 devices, this job has 8",
    ),
    "no mesh": (lambda m: xs.enable_manual_sharding(_tensor(), (0, 1)), "set_global_mesh"),
    "parts": (
        lambda m: xs.disable_manual_sharding(_tensor(), ("data", None), (8, 8), mesh=m),
        r"parts of shape \(8, 8\) do not make up",
    ),
}


def _tensor():
    return torch.ones(8, 8).to("xla")


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_errors_say_what_to_do(mesh, mistake):
    attempt, text = MISTAKES[mistake]
    with pytest.raises(ValueError, match=text):
        attempt(mesh)


def test_before_and_after_the_mode_is_entered(run_python):
    found = run_python(
        """
        import warnings
        import torch, torch_xla, numpy as np
        import torch_xla.runtime as xr
        import torch_xla.distributed.spmd as xs
        assert not xr.is_spmd() and len(torch_xla.devices()) == 8
        def error_of(function, *arguments):
            try:
                function(*arguments)
            except RuntimeError as error:
                return str(error)
        too_early = error_of(xs.mark_sharding, torch.ones(8).to("xla"), xs.get_1d_mesh(), (0,))
        assert "torch_xla.runtime.use_spmd()" in too_early
        layer = torch.nn.Linear(8, 8).to("xla")
        before = layer(torch.ones(2, 8, device="xla")).detach()
        pending = before + 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            xr.use_spmd()
        assert "Call it first" in str(caught[0].message)
        mesh = xs.get_1d_mesh("data")
        xs.mark_sharding(layer.weight, mesh, ("data", None))
        after = layer(torch.ones(2, 8, device="xla"))
        torch.testing.assert_close(after.cpu(), before.cpu())
        torch.testing.assert_close(pending.cpu(), before.cpu() + 1)
        print(torch_xla.devices(), xs.wrap_if_sharded(layer.weight).local_shards[5].data.shape)
        """
    )
    assert "[device(type='xla', index=0)] torch.Size([1, 8])" in found


def test_the_environment_variable_is_the_mode_too(run_python):
    code = "import torch_xla, torch_xla.runtime as xr; print(xr.is_spmd(), torch_xla.devices())"
    assert run_python(code, XLA_USE_SPMD="1") == "True [device(type='xla', index=0)]\n"


def test_the_report_lists_collectives_and_bytes(mesh):
    tensor = torch.ones(64, 64).to("xla")
    xs.mark_sharding(tensor, mesh, ("data", None))
    layer = torch.nn.Linear(64, 64).to("xla")
    total = layer(tensor).sum()
    torch_xla.sync()
    assert total.cpu().isfinite()
    one = next(t for t in program_report.live_tensors(layer) if t.name == "weight")
    assert one.device_bytes == dict.fromkeys(range(8), 64 * 64 * 4)
    mine = next(
        t
        for t in program_report.live_tensors()
        if t.sharding == spec_of(tensor) and t.shape == (64, 64)
    )
    assert mine.device_bytes == dict.fromkeys(range(8), 64 * 64)
    assert program_report.bytes_per_device([one, mine]) == dict.fromkeys(range(8), 64 * 64 * 5)
    assert {c.kind for c in program_report.collectives(all_programs()[-1])} == {"all-reduce"}
    text = program_report.sharding_report(layer)
    assert "Collectives of the program" in text and "weight" in text


def test_collectives_are_read_from_hlo():
    hlo = """
      %all-reduce.1 = (f32[4,2]{1,0}, bf16[8]{0}) all-reduce(%a, %b), channel_id=1
      ROOT %all-gather.3 = s32[8,4]{1,0:T(8,128)} all-gather(%c), dimensions={0}
      %start = (f32[2]{0}, f32[16]{0}) all-gather-start(%d), channel_id=2
      %done = f32[16]{0} all-gather-done(%start)
      %sums = (f32[2]{0}, f32[16]{0}) all-reduce-start(%d, %e), channel_id=4
      %mv = (bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) collective-permute-start(%f)
      %many = ((f32[2]{0}, s8[4]{0}), (f32[16]{0}, s8[32]{0}), u32[]{:S(2)}) all-gather-start(%g, %h), channel_id=6
      %p = pred[3]{0} collective-permute(%e), channel_id=3
      %piece.6 = f32[4]{0} all-gather(%i), channel_id=7, dimensions={0}, frontend_attributes={chain_id="0"}
      %piece.8 = f32[4]{0} all-gather(%j), channel_id=7, dimensions={0}, frontend_attributes={chain_id="0"}
      %piece.9 = f32[8]{0} all-gather(%j), channel_id=8, dimensions={0}, frontend_attributes={chain_id="1"}
      %get = f32[4,2]{1,0} get-tuple-element(%all-reduce.1), index=0
    """
    found = [(one.kind, one.bytes) for one in program_report.collectives_in(hlo)]
    assert found == [
        ("all-reduce", 48), ("all-gather", 128), ("all-gather", 64), ("all-reduce", 72),
        ("collective-permute", 64), ("all-gather", 96), ("collective-permute", 3), ("all-gather", 16),
        ("all-gather", 32),
    ]  # fmt: skip


def test_sums_inside_and_outside_of_manual_sharding(mesh):
    """The two have a constant in common, which the partitioner must not take for a manual value."""
    values = torch.rand(8, 8) + 1
    tensor = values.to("xla")
    xs.mark_sharding(tensor, mesh, ("data", None))
    part = xs.enable_manual_sharding(tensor, ("data", None), mesh=mesh).global_tensor
    share = part / part.sum(1, keepdim=True) + torch.zeros(2, 8, device="xla")
    whole = xs.disable_manual_sharding(share, ("data", None), (8, 8), mesh=mesh).global_tensor
    # each row's shares are one
    assert whole.square().sqrt().sum().item() == pytest.approx(8)


@pytest.mark.parametrize("marked", ["first", "second"])
def test_shard_as_lays_both_alike(mesh, marked):
    """Wherever the sharding comes from, all four tensors lie as it says."""
    values = torch.arange(64.0).reshape(8, 8)
    a, b = values.to("xla") * 1, values.to("xla") @ values.to("xla")
    xs.mark_sharding(a if marked == "first" else b, mesh, ("data", "model"))
    (c, nothing), (d, _) = xs.shard_as((a, None), (b, None))
    torch_xla.sync()
    wanted = mesh.get_op_sharding(("data", "model")).text
    assert [spec_of(t) for t in (a, b, c, d)] == [wanted] * 4
    assert nothing is None
    torch.testing.assert_close(c.cpu(), values)
    torch.testing.assert_close(d.cpu(), values @ values)


def test_shard_as_reaches_what_is_computed_in_the_program(mesh):
    """The compiler is told too: what no user's tensor shows is split as the value that it is paired with."""
    values = torch.randn(8, 8)
    split = values.to("xla")
    xs.mark_sharding(split, mesh, ("data", None))
    product, _ = xs.shard_as(values.to("xla") @ values.to("xla").t(), split)
    total = product.sum()
    torch_xla.sync()
    hlo = all_programs()[-1].executable.optimized_hlo()
    assert "f32[2,8]{1,0} dot" in hlo  # two of eight rows on each device
    torch.testing.assert_close(total.cpu(), (values @ values.t()).sum(), rtol=1e-5, atol=1e-4)


def test_shard_as_passes_gradients(mesh):
    a, b = (torch.ones(8, 8, device="xla", requires_grad=True) for _ in range(2))
    c, d = xs.shard_as(a * 2, b * 3)
    (c + d).sum().backward()
    assert a.grad.cpu().unique().tolist() == [2] and b.grad.cpu().unique().tolist() == [3]


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (lambda t: [t], lambda t: (t,), "two trees of the same structure"),
        (lambda t: [t], lambda t: [t[:2]], r"the same shape, got \(8, 8\) and \(2, 8\)"),
        (lambda t: [t], lambda t: [None], "one of the two trees has None"),
    ],
)
def test_shard_as_needs_pairs(mesh, a, b, problem):
    t = torch.ones(8, 8, device="xla")
    with pytest.raises(ValueError, match=problem):
        xs.shard_as(a(t), b(t))


def test_annotations_by_torch_xlas_operator(mesh):
    values = torch.arange(64.0).reshape(8, 8)
    names = str(tuple(mesh.axis_names))
    split = custom_kernel.dynamo_mark_sharding(
        values.to("xla"), mesh.device_ids.tolist(), list(mesh.mesh_shape), names, "('data', None)"
    )
    torch_xla.sync()
    assert set(held(split).values()) == {256 // mesh.shape()["data"]}
    torch.testing.assert_close(split.cpu(), values)


def test_a_tensor_that_is_each_devices_own(mesh):
    with pytest.raises(ValueError, match="got no mesh"):
        xs._mark_manual_sharding(torch.ones(4, device="xla"))
    xs.set_global_mesh(mesh)
    try:
        part = xs._mark_manual_sharding(torch.arange(4.0).to("xla"))
        assert spec_of(part) == "{manual}"
        assert part.shape == (4,)
        whole = xs.disable_manual_sharding(part * 2, (None,), (4,))
        torch.testing.assert_close(whole.cpu(), torch.arange(4.0) * 2)
    finally:
        xs.set_global_mesh(None)


def test_a_function_under_spmd_mode():
    @spmd_api.with_xla
    def function(a, b=1):
        return a + b, xr.is_spmd()

    assert function(1, b=3) == (4, True)
    assert function.__name__ == "function"
