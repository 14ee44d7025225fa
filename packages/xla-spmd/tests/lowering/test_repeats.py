"""Repeats of a sharded step are lowered once, as functions or as loops, and give what they give without that."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla.utils.checkpoint import checkpoint
from xla_core.contract.device_protocol import Loops, Outlining
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import all_programs, module_text
from xla_spmd.lowering import gathering
from xla_spmd.reports import program_report

WIDTH, HEADS, LENGTH, LAYERS, STEPS = 16, 4, 8, 4, 3


class Block(nn.Module):
    """Attention and a linear layer whose result is annotated, with its gradient."""

    def __init__(self, mesh=None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mesh = mesh

    def forward(self, x):
        heads = (
            f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        hidden = self.up(x)
        if self.mesh is not None:
            hidden = xs.mark_sharding_with_gradients(hidden, self.mesh, ("data", None, "model"))
        return x + self.down(F.dropout(hidden.relu(), 0.0))


def split(model, mesh):
    """Heads and hidden layers over ``model``, the rows of what comes back from them over ``data``."""
    model = model.to("xla")
    for block in model:
        block.mesh = mesh
        for layer in (block.q, block.k, block.v, block.up):
            xs.mark_sharding(layer.weight, mesh, ("model", "data"))
            xs.mark_sharding(layer.bias, mesh, ("model",))
        xs.mark_sharding(block.down.weight, mesh, ("data", "model"))
    return model


def losses(model, device, mesh=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    if mesh is not None:
        xs.mark_sharding(x, mesh, ("data", None, None))
    found = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)  # a number that changes: it is lifted
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if mesh is not None:
            torch_xla.sync()
        found.append(loss.detach())
    return [loss.item() for loss in found]


def functions_of(program):
    text = module_text(program.program.stablehlo)
    return [f for f in text.split("func.func private @")[1:] if f.startswith("xla_repeat")], text


def test_sharded_repeats_are_lowered_once(monkeypatch):
    torch.manual_seed(0)
    reference = nn.Sequential(*[Block() for _ in range(LAYERS)])
    mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "model"))
    models = [split(copy.deepcopy(reference), mesh) for _ in range(2)]
    expected = losses(reference, "cpu")

    steps = []
    for model, value in zip(models, ("0", "1"), strict=True):
        monkeypatch.setenv("XLA_OUTLINE_REPEATS", value)
        torch_xla.sync()
        runtime.trace_of(None).forget()  # the same step was compiled in another way before
        # sums over devices are added in another order
        assert losses(model, xm.xla_device(), mesh) == pytest.approx(expected, rel=1e-5)
        steps.append(all_programs()[-1])

    before, after = steps
    assert functions_of(before)[0] == []
    functions, text = functions_of(after)
    assert functions
    assert all(text.count(f"call @{f.split('(')[0]}(") >= LAYERS - 1 for f in functions)
    assert any("sharding_constraint" in f for f in functions)  # an annotation inside
    collectives = [Counter(c.kind for c in program_report.collectives(p)) for p in (before, after)]
    assert collectives[0] == collectives[1]
    memory = [p.executable.memory_analysis() for p in (before, after)]
    assert memory[1]["arguments"] == memory[0]["arguments"]
    assert memory[1]["aliased"] == memory[0]["aliased"]  # donated through the functions, too
    assert memory[1]["temporaries"] <= 1.05 * memory[0]["temporaries"]


def by_parts(x, mesh, spec):
    """Layers between the marks of a region laid out by hand: constants are used inside and outside."""
    for _ in range(LAYERS):
        part = xs.enable_manual_sharding(x, spec, mesh=mesh).global_tensor
        part = torch.tanh(part * 0.5 + 0.25).exp().sin().cos() * 0.5
        x = xs.disable_manual_sharding(part, spec, x.shape, mesh=mesh).global_tensor
        x = torch.tanh(x * 0.5 + 0.25).exp().sin().cos() * 0.5
    return x


def test_repeats_with_regions_laid_out_by_hand_stay_in_one_function():
    mesh = xs.Mesh(np.arange(8), (8,), ("data",))
    x = torch.randn(16, 4)
    expected = x
    for _ in range(2 * LAYERS):
        expected = torch.tanh(expected * 0.5 + 0.25).exp().sin().cos() * 0.5
    found = by_parts(x.to("xla"), mesh, ("data", None))
    torch_xla.sync()
    torch.testing.assert_close(found.cpu(), expected)
    assert functions_of(all_programs()[-1])[0] == []


def test_sharded_repeats_run_as_loops(monkeypatch):
    torch.manual_seed(0)
    reference = nn.Sequential(*[Block() for _ in range(LAYERS)])
    mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "model"))
    expected = losses(copy.deepcopy(reference), "cpu")
    steps = []
    for value in ("0", "1"):
        monkeypatch.setenv("XLA_LOOP_REPEATS", value)
        torch_xla.sync()
        runtime.trace_of(None).forget()
        model = split(copy.deepcopy(reference), mesh)
        assert losses(model, xm.xla_device(), mesh) == pytest.approx(expected, rel=1e-5)
        steps.append(all_programs()[-1])
    assert [loops_of(step) for step in steps] == [0, 2]
    memory = [step.executable.memory_analysis() for step in steps]
    assert memory[1]["arguments"] == memory[0]["arguments"]
    assert memory[1]["aliased"] == memory[0]["aliased"]


def loops_of(program):
    return module_text(program.program.stablehlo).count("stablehlo.while")


@pytest.mark.parametrize("inside", [True, False], ids=["regions in layers", "layers in a region"])
def test_regions_laid_out_by_hand_are_whole_in_a_loop(monkeypatch, inside):
    monkeypatch.setenv("XLA_LOOP_REPEATS", "1")
    torch.manual_seed(0)
    mesh, spec = xs.Mesh(np.arange(8), (8,), ("data",)), ("data", None)
    x = torch.randn(16, 4)
    weights = [torch.randn(4, 4) * 0.5 for _ in range(2 * LAYERS)]

    def layer(x, weight):
        for _ in range(6):
            x = torch.tanh(x @ weight * 0.5 + 0.25).cos()
        return x

    expected = x
    for weight in weights:
        expected = layer(expected, weight)
    found, weights = x.to("xla"), [w.to("xla") for w in weights]
    if not inside:
        found = xs.enable_manual_sharding(found, spec, mesh=mesh).global_tensor
    for weight in weights:
        if inside:
            found = xs.enable_manual_sharding(found, spec, mesh=mesh).global_tensor
        found = layer(found, weight)
        if inside:
            found = xs.disable_manual_sharding(found, spec, x.shape, mesh=mesh).global_tensor
    if not inside:
        found = xs.disable_manual_sharding(found, spec, x.shape, mesh=mesh).global_tensor
    torch_xla.sync()
    torch.testing.assert_close(found.cpu(), expected)
    assert loops_of(all_programs()[-1]) == (1 if inside else 0)


class Wide(nn.Module):
    """A layer whose input, if there is a mesh, is split as ``spec`` says, and so is its gradient."""

    def __init__(self, mesh, spec):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.mesh, self.spec = mesh, spec

    def forward(self, x):
        x = xs.mark_sharding_with_gradients(x, self.mesh, self.spec)
        hidden = self.up(torch.sin(torch.cos(x) * 0.5 + 0.25) * 2.0)
        return x + self.down(F.gelu(hidden + 0.125).relu() - 0.5)


@pytest.mark.parametrize(
    ("weight", "activation", "again", "loops"),
    [
        ((None, "a"), ("a", None), True, 2),  # weights are gathered from all devices
        ((None, "a"), ("a", None), False, 0),  # the backward pass needs too much of each layer
        ((None, "a"), (None, None), True, 0),  # each device computes with its part of a weight
        ((None, None), ("a", None), True, 0),  # each device has whole weights
    ],
    ids=["gathered", "saved", "tensor parallel", "data parallel"],
)
def test_loops_are_made_where_they_pay(monkeypatch, weight, activation, again, loops):
    client = type(runtime.client())
    chosen = Outlining(loops=Loops(min_trips=LAYERS, min_gathered=8, max_saved=2.0))
    monkeypatch.setattr(client, "outlining", chosen)
    mesh = xs.Mesh(np.arange(8), (8,), ("a",))
    model = nn.Sequential(*[Wide(mesh, activation) for _ in range(2 * LAYERS)]).to("xla")
    for parameter in model.parameters():
        xs.mark_sharding(parameter, mesh, (weight if parameter.dim() == 2 else (None,)))
    x = torch.randn(32, WIDTH).to("xla").requires_grad_()
    xs.mark_sharding(x, mesh, activation)
    for layer in model:
        x = checkpoint(layer, x) if again else layer(x)
    x.pow(2).mean().backward()
    torch_xla.sync()
    assert loops_of(all_programs()[-1]) == loops


def test_devices_that_a_parameter_is_gathered_from():
    def devices(parameter, value):
        mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "model"))
        texts = (mesh.get_op_sharding(spec).text for spec in (parameter, value))
        return gathering.devices(*texts, 8)

    assert devices((("data", "model"), None), (("data", "model"), None, None)) == 8
    assert devices((None, "model"), ("data", None)) == 1
    assert devices(("model", None), ("model", None)) == 4
    assert devices(("model", "data"), ("data", None)) == 2
    assert devices((None, None), ("data", None)) == 1
    assert devices(("data", None), (None, None)) == 1
