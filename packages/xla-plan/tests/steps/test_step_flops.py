"""FLOPs are counted while a step is recorded, and the step is the one that is recorded without counting."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core.support.counters import all_counters
from xla_plan.steps.step_flops import StepFlops


def test_counting_leaves_the_step_as_it_is():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)).to("xla")
    inputs = torch.ones(3, 5, 8).to("xla")

    def step():
        model.zero_grad()
        model(inputs).square().mean().backward()

    for _ in range(2):
        step()
        torch_xla.sync()
    compiled = all_counters()["UncachedCompile"]
    with StepFlops() as count:
        step()
    torch_xla.sync()
    assert all_counters()["UncachedCompile"] == compiled
    first, second = 2 * 15 * 8 * 4, 2 * 15 * 4 * 2
    assert count.forward == first + second
    # nobody needs the gradient of the inputs
    assert count.backward == first + 2 * second
    assert count.model == 3 * (first + second)


def test_products_that_are_no_layers_count_by_torchs_formulas():
    a, b = torch.ones(4, 6).to("xla"), torch.ones(6, 5).to("xla")
    image, kernel = torch.ones(1, 2, 6, 6).to("xla"), torch.ones(3, 2, 3, 3).to("xla")
    with StepFlops() as count:
        a @ b
        F.conv2d(image, kernel)
    assert count.forward == 2 * 4 * 6 * 5 + 2 * (3 * 4 * 4) * (2 * 3 * 3)
    assert count.backward == 0
