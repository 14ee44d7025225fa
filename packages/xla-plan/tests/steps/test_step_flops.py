"""FLOPs are counted while a step is recorded, and the step is the one that is recorded without counting."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core.extension_api import runtime
from xla_core.support.counters import all_counters
from xla_plan.steps.step_flops import StepFlops, recorded_flops

BATCH, LENGTH, WIDTH, HEADS = 3, 5, 8, 2


class Block(nn.Module):
    """Attention between linear layers, without a mask."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        return self.outer(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Cells(nn.Module):
    """An LSTM cell over the length."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        state = None
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state[0]


class Normalized(nn.Module):
    """A convolution over the length, and batch norm."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(LENGTH, 4, 1), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.convolution(x))


TOKENS = BATCH * LENGTH
FORWARD = {
    "linear": 2 * TOKENS * WIDTH * WIDTH,
    "attention": 2 * TOKENS * WIDTH * 4 * WIDTH + 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH,
    "cells": 2 * 2 * TOKENS * WIDTH * 4 * WIDTH,
    "normalized": 2 * BATCH * WIDTH * LENGTH * 4,
}
MODELS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "attention": Block,
    "cells": Cells,
    "normalized": Normalized,
}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_counting_leaves_the_step_as_it_is(name, trains):
    model = MODELS[name]().to("xla").train(trains)
    inputs = torch.ones(BATCH, LENGTH, WIDTH).to("xla")

    def step():
        with torch.set_grad_enabled(trains):
            result = model(inputs).square().mean()
        if trains:
            model.zero_grad()
            result.backward()
        return result

    for _ in range(2):
        kept = step()
        torch_xla.sync()
    compiled = all_counters()["UncachedCompile"]
    with StepFlops() as count:
        kept = step()
    # those of the entries are the same; with lines recorded, it is known which are of the backward pass
    assert recorded_flops(runtime.trace_of(None).cur.path()).all == count.flops.all
    torch_xla.sync()
    del kept
    assert all_counters()["UncachedCompile"] == compiled
    assert count.flops.forward == FORWARD[name]
    assert bool(count.flops.backward) == trains
    assert count.flops.model == FORWARD[name] * (3 if trains else 1)


def test_the_backward_pass_counts_the_products_of_the_gradients_that_are_wanted():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)).to("xla")
    inputs = torch.ones(3, 5, 8).to("xla")
    with StepFlops() as count:
        model(inputs).square().mean().backward()
    first, second = 2 * 15 * 8 * 4, 2 * 15 * 4 * 2
    assert count.flops.forward == first + second
    # nobody wants the gradient of the inputs
    assert count.flops.backward == first + 2 * second


def test_products_that_are_no_layers_count_by_torchs_formulas():
    a, b = torch.ones(4, 6).to("xla"), torch.ones(6, 5).to("xla")
    image, kernel = torch.ones(1, 2, 6, 6).to("xla"), torch.ones(3, 2, 3, 3).to("xla")
    with StepFlops() as count:
        a @ b
        F.conv2d(image, kernel)
    assert count.flops.forward == 2 * 4 * 6 * 5 + 2 * (3 * 4 * 4) * (2 * 3 * 3)
    assert count.flops.backward == 0
