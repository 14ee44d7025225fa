"""torch.distributed.tensor over DeviceMesh("xla"), and linear layers in torch_xla's other forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla.distributed.spmd.api import convert_to_xla_mesh
from xla_spmd.reports import program_report

spec_of = torch_xla._XLAC._get_xla_sharding_spec


@pytest.fixture
def device_mesh():
    return DeviceMesh("xla", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"))


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ([Shard(0), Shard(1)], ("data", "model")),
        ([Shard(-1), Replicate()], (None, "data")),
        ([Shard(0), Shard(0)], (("data", "model"), None)),
        (None, (None, None)),
    ],
)
def test_placements_mean_the_same_as_partition_specs(device_mesh, mesh, placements, spec):
    values = torch.arange(64.0).reshape(8, 8)
    made = distribute_tensor(values, device_mesh, placements)
    assert isinstance(made, xs.XLAShardedTensor) and made.mesh == mesh
    assert made.sharding_spec == mesh.get_op_sharding(spec).text
    assert made.cpu().equal(values)
    wanted = [Shard(p.dim % 2) if isinstance(p, Shard) else p for p in placements or ()]
    assert list(made.placements) == (wanted or [Replicate()] * 2)


def test_a_distributed_module_trains(device_mesh, mesh):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model.load_state_dict(host.state_dict())
    seen = []

    def partition(name, submodule, given):
        seen.append(name)
        if isinstance(submodule, nn.Linear):
            split = distribute_tensor(submodule.weight, given, [Shard(0), Replicate()])
            submodule.weight = nn.Parameter(split)

    def inputs(_module, arguments, given):
        return (distribute_tensor(arguments[0], given, [Shard(0), Replicate()]),)

    distribute_module(model, device_mesh, partition, inputs, lambda _module, out, _mesh: out * 2)
    assert seen == ["", "0", "1", "2"]
    text = mesh.get_op_sharding(("data", None)).text
    batch = torch.randn(8, 8)
    results = []
    for module, factor in ((host, 2), (model, 1)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (module(batch) * factor).square().mean().backward()
            if module is model:  # a gradient on its own, nothing updates the parameter yet
                torch_xla.sync()
                assert spec_of(module[0].weight.grad) == text
            optimizer.step()
        results.append([p.detach().cpu() for p in module.parameters()])
    for mine, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, expected)
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert spec_of(model[0].weight) == spec_of(state) == text
    held = {t.name: t.device_bytes[0] for t in program_report.live_tensors(model)}
    assert held["0.weight"] == 16 * 8 * 4 // 4


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda m: distribute_tensor(torch.ones(8), m, [Shard(1), Replicate()]), "1 dimensions"),
        (lambda m: distribute_tensor(torch.ones(8), m, [Shard(0)]), "1 placements for a device"),
        (lambda m: distribute_tensor(torch.ones(8), m, [Partial(), Replicate()]), "Partial sums"),
        (lambda _: xs.xla_distribute_module(nn.Linear(1, 1)), "no device mesh"),
        (
            lambda _: convert_to_xla_mesh(DeviceMesh("cpu", [0], _init_backend=False, _rank=0)),
            "mesh is for 'cpu' devices",
        ),
    ],
)
def test_what_does_not_fit_is_refused(device_mesh, attempt, text):
    with pytest.raises(ValueError, match=text):
        attempt(device_mesh)


def test_an_annotation_of_one_value_does_not_last(mesh):
    tensor = torch.ones(8, 8).to("xla")
    torch_xla.sync()
    made = xs.annotate_custom_sharding(tensor, mesh, ("data", None))
    assert isinstance(made, xs.XLAShardedTensor)
    result = tensor * 2
    torch_xla.sync()
    assert spec_of(result) == mesh.get_op_sharding(("data", None)).text
    assert xs.wrap_if_sharded(tensor) is tensor
    assert result.cpu().eq(2).all()


def test_linear_layers_by_einsum():
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2, bias=False))
    model = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2, bias=False))
    model.load_state_dict(host.state_dict())
    assert xs.apply_xla_patch_to_nn_linear(model.to("xla")) is model
    values = torch.randn(3, 5, 6)
    expected = host(values)
    result = model(values.to("xla"))
    torch.testing.assert_close(result.cpu(), expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    for p, q in zip(model.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert model(values.to("xla")).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="GELU has none"):
        xs.apply_xla_patch_to_nn_linear(nn.GELU())


def test_a_barrier_in_the_backward_pass():
    layer = nn.Linear(4, 4).to("xla")
    xs.apply_backward_optimization_barrier(layer)
    x = torch.ones(2, 4, device="xla", requires_grad=True)
    layer(x * 1).sum().backward()
    text = xm.get_stablehlo([x.grad])
    assert "optimization_barrier" in text
    torch.testing.assert_close(x.grad.cpu(), layer.weight.detach().cpu().sum(0).expand(2, 4))
