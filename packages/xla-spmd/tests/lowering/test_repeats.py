"""Repeats of a sharded step are lowered once; what is partitioned is the same as without that."""

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
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import all_programs, module_text
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
