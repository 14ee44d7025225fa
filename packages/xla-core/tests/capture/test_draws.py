"""What a step draws on the host may decide what it does: it is recorded more often before it is replayed."""

from __future__ import annotations

import itertools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from torch_xla.experimental.capture import CaptureError, capture
from xla_core.capture.captured import CALLS_THAT_DRAW
from xla_core.support import counters

OWN = random.Random(0)
OF_NUMPY = np.random.default_rng(0)
OLD_OF_NUMPY = np.random.RandomState(0)
OF_TORCH = torch.Generator()


def counting():
    number = 0
    while True:
        number += 1
        yield number


HOLDER = types.SimpleNamespace(counting=counting())
COUNT = itertools.count()
RANGE = iter(range(1000))
CHOICES = {
    "random": lambda: random.random() < 0.5,
    "random, in Python": lambda: random.uniform(0, 1) < 0.5,
    "a Random": lambda: OWN.random() < 0.5,
    "numpy": lambda: np.random.rand() < 0.5,
    "a Generator of numpy": lambda: OF_NUMPY.random() < 0.5,
    "a RandomState": lambda: OLD_OF_NUMPY.rand() < 0.5,
    "torch": lambda: bool(torch.rand(()) < 0.5),
    "a Generator of torch": lambda: bool(torch.rand((), generator=OF_TORCH) < 0.5),
    "a count": lambda: next(COUNT) % 10 == 9,
    "an iterator": lambda: next(RANGE) % 10 == 9,
    "a generator": lambda: next(HOLDER.counting) % 10 == 9,
}


def seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def replays():
    return counters.all_counters().get("CapturedStepReplayed", 0)


@pytest.mark.parametrize("kind", CHOICES)
def test_a_choice_by_chance_is_not_replayed(kind):
    """Two calls in a row that chose the same would do for a step that does not draw."""
    seed()
    choose = CHOICES[kind]
    step = capture(lambda x: x * 2 if choose() else x + 1)
    before = replays()
    with pytest.raises(CaptureError, match="recorded different programs"):
        for _ in range(CALLS_THAT_DRAW):
            step(torch.ones(2, device="xla"))
    assert replays() == before


def test_a_draw_that_decides_nothing():
    """As layers of transformers that are dropped with the probability 0."""
    step = capture(lambda x: x * 2 if random.random() < 0.0 else x + 1)
    before = replays()
    for _ in range(1 + CALLS_THAT_DRAW):
        assert step.recordings == 0
        assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    assert replays() == before + 1


def test_what_the_operating_system_draws_has_no_state():
    chance = random.SystemRandom()
    step = capture(lambda x: x * 2 if chance.random() < 0.0 else x + 1)
    for _ in range(4):
        step(torch.ones(2, device="xla"))
    assert step.recordings == 1


def trained(step_of):
    """Losses, and what Python, numpy and PyTorch draw on the host after a training."""
    seed()
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = step_of(step)
    losses = [step(torch.ones(2, 4, device="xla")).item() for _ in range(6)]
    return losses, random.random(), np.random.rand(), torch.rand(()).item()


def test_the_hosts_random_numbers_stay_what_they_were():
    assert trained(capture) == trained(lambda step: step)
