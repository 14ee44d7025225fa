"""SpmdFullyShardedDataParallel: what is split, what is wrapped, and what is computed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from xla_spmd.reports import program_report

spec_of = torch_xla._XLAC._get_xla_sharding_spec


@pytest.fixture
def fsdp_mesh():
    return xs.Mesh(np.arange(8), (2, 4), ("data", "fsdp"))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.Linear(12, 3))


def test_it_trains_as_the_module_alone(fsdp_mesh):
    host = model()
    split = FSDPv2(model().to("xla"), mesh=fsdp_mesh, extra_data_axis="data")
    batch = torch.randn(16, 8)
    losses = []
    for module, values in ((host, batch), (split, batch.to("xla"))):
        if module is split:
            xs.mark_sharding(values, fsdp_mesh, (("data", "fsdp"), None))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(values).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    specs = {n: spec_of(p) for n, p in split.module.named_parameters()}
    over = {
        s: fsdp_mesh.get_op_sharding(s).text for s in (("fsdp", None), (None, "fsdp"), ("fsdp",))
    }
    assert specs["0.weight"] == over["fsdp", None] and specs["2.weight"] == over[None, "fsdp"]
    assert specs["3.weight"] == over[None, "fsdp"]  # 3 rows do not divide, 12 columns do
    assert specs["0.bias"] == over["fsdp",] and specs["3.bias"] == "{replicated}"
    shares = program_report.parameter_shares(split, optimizer)
    whole = sum(p.numel() * 4 for n, p in split.module.named_parameters())
    assert shares["parameters"][0] == (whole - 3 * 4) // 4 + 3 * 4
    assert shares["state"][0] == 2 * shares["parameters"][0]


def test_inner_modules_are_wrapped_by_a_policy(fsdp_mesh):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    wrapped = FSDPv2(nn.Sequential(model()).to("xla"), mesh=fsdp_mesh, auto_wrap_policy=policy)
    kinds = [type(m).__name__ for m in wrapped[0]]
    assert kinds == ["SpmdFullyShardedDataParallel", "GELU", *["SpmdFullyShardedDataParallel"] * 2]
    assert wrapped[0][0].in_features == 8  # attributes of the module inside
    x = torch.ones(8, 8).to("xla")
    out = wrapped(x)
    torch_xla.sync()
    assert spec_of(out) == fsdp_mesh.get_op_sharding(("fsdp", None)).text
    torch.testing.assert_close(out.detach().cpu(), model()(torch.ones(8, 8)).detach())
    marked = []
    only = FSDPv2(
        model().to("xla"),
        mesh=fsdp_mesh,
        auto_wrap_policy=policy,
        auto_wrapper_callable=lambda module, **options: marked.append(options) or module,
        shard_output=lambda output, mesh: marked.append((tuple(output.shape), mesh)),
    )
    only(x)
    assert len(marked) == 4 and marked[-1] == ((8, 3), fsdp_mesh)
    assert all(
        options == {"mesh": fsdp_mesh, "shard_output": only.shard_output, "extra_data_axis": None}
        for options in marked[:3]
    )


def test_what_cannot_be_wrapped(fsdp_mesh, mesh):
    layer = nn.Linear(8, 8).to("xla")
    with pytest.raises(ValueError, match="has no axis named 'fsdp'"):
        FSDPv2(layer, mesh=mesh)
    with pytest.raises(ValueError, match="no axis named 'batch'"):
        FSDPv2(layer, mesh=fsdp_mesh, extra_data_axis="batch")
    with pytest.raises(RuntimeError, match="already wrapped"):
        FSDPv2(FSDPv2(layer, mesh=fsdp_mesh), mesh=fsdp_mesh)

    class Named(nn.Linear):
        def forward(self, x):
            return {"out": super().forward(x)}

    with pytest.raises(RuntimeError, match="returned dict: pass shard_output"):
        FSDPv2(Named(8, 8).to("xla"), mesh=fsdp_mesh)(torch.ones(8, 8, device="xla"))


def test_the_keys_of_state_dicts_are_those_of_torch_xla(fsdp_mesh):
    wrapped = FSDPv2(nn.Sequential(nn.Linear(8, 8)), mesh=fsdp_mesh)
    assert list(wrapped.state_dict()) == ["_orig_module.0.weight", "_orig_module.0.bias"]
    again = FSDPv2(nn.Sequential(nn.Linear(8, 8)), mesh=fsdp_mesh)
    again.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(again[0].weight.detach().cpu(), wrapped[0].weight.detach().cpu())


def test_layers_are_wrapped_with_checkpointing(fsdp_mesh):
    """As transformers' Trainer does for ``xla_fsdp_grad_ckpt``: what it hands on reaches the inner wrappers."""
    pytest.importorskip("xla_dist", reason="checkpoint_module is in the package xla-dist")
    fsdp = pytest.importorskip("torch_xla.distributed.fsdp")
    shapes = []

    def wrap(module, *args, **kwargs):
        return FSDPv2(fsdp.checkpoint_module(module), *args, **kwargs)

    def shard_output(output, mesh):
        shapes.append(tuple(output.shape))
        xs.mark_sharding(output, mesh, ("fsdp", None))

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    host = model()
    split = FSDPv2(
        model(), mesh=fsdp_mesh, shard_output=shard_output, auto_wrap_policy=policy,
        auto_wrapper_callable=wrap,
    )  # fmt: skip
    batch = torch.randn(6, 8)  # rows that four devices share unevenly
    values = batch.to("xla")
    xs.mark_sharding(values, fsdp_mesh, ("fsdp", None))
    for module, x in ((host, batch), (split, values)):
        module(x).square().mean().backward()
    assert {(6, 16), (6, 12), (6, 3)} <= set(shapes)
    for p, q in zip(host.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-6)


def test_a_module_on_the_cpu_is_moved(fsdp_mesh):
    layer = nn.Linear(8, 8)
    before = layer.weight.detach().clone()
    wrapped = FSDPv2(layer, mesh=fsdp_mesh)
    assert wrapped.module is layer and spec_of(layer.weight).startswith("{devices=[4,1,2]")
    torch.testing.assert_close(layer.weight.detach().cpu(), before)


def test_the_global_mesh_is_the_default(fsdp_mesh):
    before = xs.get_global_mesh()
    try:
        xs.set_global_mesh(None)
        with pytest.raises(ValueError, match="set_global_mesh"):
            FSDPv2(nn.Linear(8, 8).to("xla"))
        xs.set_global_mesh(fsdp_mesh)
        assert spec_of(FSDPv2(nn.Linear(8, 8).to("xla")).weight).startswith("{devices=[4,1,2]")
    finally:
        xs.set_global_mesh(before)
