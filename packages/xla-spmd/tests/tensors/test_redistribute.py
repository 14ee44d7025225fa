"""DTensor's methods on tensors split over DeviceMesh("xla"): redistribute, full_tensor, to_local."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torch_xla
import torch_xla.distributed.spmd as xs

ends_graphs = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="Dynamo of torch 2.11 raises where it has to end a graph before a DTensor's method",
)
R = Replicate()
UNEVEN, EVEN = (7, 3), (8, 4)


@pytest.fixture
def device_mesh():
    return DeviceMesh("xla", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"))


def parts(values, device_mesh, placements):
    """What each device holds of ``values``: dimensions cut in equal parts, of which the last are shorter."""
    grid = device_mesh.mesh
    found = []
    for device in range(grid.numel()):
        place = (grid == device).nonzero()[0].tolist()
        part = values
        for dim in range(values.dim()):
            axes = [
                i for i, p in enumerate(placements) if p in (Shard(dim), Shard(dim - values.dim()))
            ]
            count, number = 1, 0
            for axis in axes:
                count, number = count * grid.shape[axis], number * grid.shape[axis] + place[axis]
            length = -(-values.shape[dim] // count)
            part = part.narrow(dim, *_span(number * length, length, values.shape[dim]))
        found.append(part)
    return found


def _span(start, length, size):
    start = min(start, size)
    return start, min(length, size - start)


def held(tensor):
    return [shard.unpadded_data for shard in tensor.local_shards]


def all_equal(got, expected):
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Shard(0), R], [R, R]),
        ([R, R], [Shard(1), R]),
        ([Shard(0), R], [Shard(1), R]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        ([Shard(0), Shard(0)], [R, Shard(-1)]),
        ([R, Shard(1)], [Shard(0), Shard(0)]),
    ],
)
def test_devices_hold_the_parts_that_the_placements_say(device_mesh, shape, before, after):
    values = torch.randn(shape)
    first = distribute_tensor(values, device_mesh, before)
    assert all_equal(held(first), parts(values, device_mesh, before))
    second = first.redistribute(device_mesh, after)
    assert isinstance(second, xs.XLAShardedTensor)
    assert all_equal(held(second), parts(values, device_mesh, after))
    assert second.cpu().equal(values)
    wanted = [Shard(p.dim % 2) if isinstance(p, Shard) else p for p in after]
    assert second.placements == tuple(wanted)
    # the first one stays, and shares nothing with the second
    second.add_(1)
    assert first.cpu().equal(values) and second.cpu().equal(values + 1)
    assert all_equal(held(first), parts(values, device_mesh, before))
    assert all_equal(held(second), parts(values + 1, device_mesh, after))


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("after", [[R, R], [Shard(1), R], [Shard(1), Shard(0)]])
def test_gradients_come_back_split_as_the_tensor(device_mesh, mesh, shape, after):
    values, factor = torch.randn(shape), torch.randn(shape)
    host = values.clone().requires_grad_()
    (host.sin() * factor).sum().backward()
    leaf = distribute_tensor(values.clone().requires_grad_(), device_mesh, [Shard(0), R])
    inner = leaf.sin()
    inner.retain_grad()
    split = distribute_tensor(inner, device_mesh, [Shard(0), R])
    result = split.redistribute(placements=after)
    assert leaf.is_leaf and result.requires_grad
    (result * factor.to("xla")).sum().backward()
    torch_xla.sync()
    torch.testing.assert_close(leaf.grad.cpu(), host.grad)
    text = mesh.get_op_sharding(("data", None)).text
    spec_of = torch_xla._XLAC._get_xla_sharding_spec
    assert spec_of(leaf.grad) == spec_of(inner.grad) == text


@pytest.mark.parametrize("placements", [[Shard(0), R], [Shard(1), R], [Shard(0), Shard(1)]])
def test_tensors_without_elements(device_mesh, placements):
    tensor = distribute_tensor(torch.ones(0, 3, requires_grad=True), device_mesh, [Shard(1), R])
    moved = tensor.redistribute(placements=placements)
    torch_xla.sync()
    again = moved.redistribute(placements=[R, Shard(1)])
    assert moved.shape == moved.cpu().shape == again.cpu().shape == (0, 3)
    assert moved.placements == tuple(placements)
    (moved + 1).sum().backward()
    assert tensor.grad.cpu().shape == (0, 3)


def test_a_second_derivative(device_mesh):
    values = torch.randn(UNEVEN)
    results = []
    for tensor in (values.clone(), distribute_tensor(values, device_mesh, [Shard(0), R])):
        tensor.requires_grad_()
        moved = tensor if tensor.device.type == "cpu" else tensor.redistribute(placements=[R, R])
        (first,) = torch.autograd.grad(moved.pow(3).sum(), tensor, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), tensor)
        results.append(second.cpu())
    torch.testing.assert_close(*results)


def test_a_change_of_mesh(device_mesh):
    values = torch.randn(UNEVEN)
    other = DeviceMesh("xla", torch.arange(7, -1, -1), mesh_dim_names=("all",))
    first = distribute_tensor(values, device_mesh, [Shard(0), Shard(1)])
    second = first.redistribute(other, [Shard(0)])
    assert all_equal(held(second), parts(values, other, [Shard(0)]))
    assert first.device_mesh == device_mesh and second.device_mesh == other
    assert second.redistribute(device_mesh, [R, R]).device_mesh == device_mesh


def test_dtypes_on_the_way(device_mesh):
    values = torch.randn(UNEVEN)
    leaf = distribute_tensor(values.clone().requires_grad_(), device_mesh, [Shard(0), R])
    moved = leaf.redistribute(
        placements=[R, R], forward_dtype=torch.bfloat16, backward_dtype=torch.float16
    )
    assert moved.dtype == torch.bfloat16 and moved.cpu().equal(values.bfloat16())
    factor = torch.full(UNEVEN, 1 + 2**-7).bfloat16()
    moved.backward(factor.to("xla"))
    assert leaf.grad.dtype == torch.float32 and leaf.grad.cpu().equal(factor.half().float())


def test_the_full_tensor_is_plain_and_whole_everywhere(device_mesh):
    values = torch.randn(UNEVEN)
    leaf = distribute_tensor(values.clone().requires_grad_(), device_mesh, [Shard(0), Shard(1)])
    full = leaf.full_tensor(grad_placements=[Shard(1), R])
    assert not isinstance(full, xs.XLAShardedTensor)
    assert torch_xla._XLAC._get_xla_sharding_spec(full) == "{replicated}"
    assert full.detach().cpu().equal(values)
    copies = xs.wrap_if_sharded(full).local_shards
    assert len(copies) == 8 and all(shard.data.equal(values) for shard in copies)
    full.square().sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), values * 2)


def test_the_local_tensor_is_all_that_this_process_holds(device_mesh):
    values = torch.randn(UNEVEN)
    leaf = distribute_tensor(values.clone().requires_grad_(), device_mesh, [Shard(0), R])
    local = leaf.to_local()
    assert not isinstance(local, xs.XLAShardedTensor) and local.detach().cpu().equal(values)
    local.square().sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), values * 2)
    with torch.no_grad():
        local.zero_()  # as in torch, it is the tensor's own value
    assert leaf.detach().cpu().eq(0).all()


def test_a_leaf_gets_the_gradient_wherever_it_came_from(device_mesh):
    for device in ("cpu", "xla"):
        given = torch.ones(7, 3, device=device, requires_grad=True)
        leaf = distribute_tensor(given, device_mesh, [Shard(0), R])
        (leaf * 2).sum().backward()
        assert leaf.is_leaf and leaf.grad.cpu().eq(2).all() and given.grad is None


def test_a_parameter_and_what_mark_sharding_returns_have_the_methods(device_mesh, mesh):
    values = torch.randn(EVEN)
    parameter = nn.Parameter(distribute_tensor(values, device_mesh, [Shard(0), R]))
    marked = xs.mark_sharding(values.to("xla"), mesh, ("data", "model"))
    assert parameter.device_mesh == marked.device_mesh == device_mesh
    assert parameter.redistribute(placements=[Shard(1), R]).requires_grad
    for tensor in (parameter, marked):
        moved = tensor.redistribute(placements=[R, Shard(0)])
        assert all_equal(held(moved), parts(values, device_mesh, [R, Shard(0)]))


@pytest.mark.parametrize("give", ["distribute", "redistribute"])
@pytest.mark.parametrize(
    ("placements", "error", "text"),
    [
        ([Shard(2), R], IndexError, r"range of \[-2, 1\], but got 2"),
        ([Shard(-3), R], IndexError, "but got -3"),
        ([Shard(0)], ValueError, "same length as `device_mesh.ndim`"),
        ([R, R, R], ValueError, "3 placements for a device mesh of 2"),
        ([R, Partial()], NotImplementedError, r"dimension 1\b.*give Replicate\(\) or"),
        (["data", R], RuntimeError, "unsupported placement 'data' on device mesh dimension 0"),
    ],
)
def test_placements_that_do_not_fit(device_mesh, give, placements, error, text):
    tensor = torch.ones(UNEVEN)
    with pytest.raises(error, match=text):
        if give == "distribute":
            distribute_tensor(tensor, device_mesh, placements)
        else:
            distribute_tensor(tensor, device_mesh).redistribute(placements=placements)


def test_meshes_and_tensors_that_do_not_fit(device_mesh):
    tensor = distribute_tensor(torch.ones(UNEVEN), device_mesh)
    with pytest.raises(RuntimeError, match="placements is needed for redistribute!"):
        tensor.redistribute(device_mesh)
    with pytest.raises(ValueError, match="mesh is for 'cpu' devices"):
        tensor.redistribute(DeviceMesh("cpu", [0], _init_backend=False, _rank=0), [R])
    with pytest.raises(IndexError, match="tensor has no dimensions"):
        distribute_tensor(torch.tensor(1.0), device_mesh).redistribute(placements=[Shard(0), R])
    with pytest.raises(ValueError, match="over 4 devices, this job has 8"):
        tensor.redistribute(DeviceMesh("xla", torch.arange(4)), [R])


COMPILED = {
    "redistribute": lambda t: (t * 2).sum(0) + t.redistribute(placements=[R, Shard(1)]) * 3,
    "full_tensor": lambda t: t.full_tensor().sin() + 1,
    "to_local": lambda t: t.to_local() * 2 + t.to_local().sum(),
}


@ends_graphs
# torch's own, when a graph begins with a tensor that is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_inside_functions_of_torch_compile(device_mesh, name):
    """A graph ends before the method and another begins behind it; values and gradients are those without."""
    values = torch.randn(EVEN)
    results = []
    for form in (COMPILED[name], torch.compile(COMPILED[name], backend="openxla")):
        leaf = distribute_tensor(values.clone().requires_grad_(), device_mesh, [Shard(0), R])
        result = form(leaf)
        result.square().sum().backward()
        results.append((result.detach().cpu(), leaf.grad.cpu()))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@ends_graphs
def test_results_of_compiled_functions_keep_their_methods(device_mesh):
    function = torch.compile(lambda t: t.redistribute(placements=[Shard(1), R]), backend="openxla")
    values = torch.randn(EVEN)
    moved = function(distribute_tensor(values, device_mesh, [Shard(0), R]))
    assert all_equal(held(moved), parts(values, device_mesh, [Shard(1), R]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="redistribute"):
        torch.compile(COMPILED["redistribute"], backend="openxla", fullgraph=True)(moved)
