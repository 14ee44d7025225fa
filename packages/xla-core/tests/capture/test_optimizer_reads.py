"""What a step reads of optimizers and schedulers, and what optimizers of others change, is refused or right.

Each case was replayed with the numbers of its recording before.
"""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from torch_xla.experimental.capture import CaptureError, capture

CALLS = 10


class Trainer:
    """Trains a layer. ``rate``, ``counts`` and the like are what its cases read or change."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2).to("xla")
        self.optimizer = kind(self.net.parameters(), lr=0.1)
        self.schedule = StepLR(self.optimizer, 5, 0.5)
        self.pair = (0, "steps")
        self.number = np.int64(0)
        self.phase = Phase.FIRST

    def train(self, x, scale=1.0):
        self.optimizer.zero_grad()
        loss = self.net(x).pow(2).sum() * scale
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Phase(enum.Enum):
    FIRST = 1
    SECOND = 2


def scales_by_the_rate(trainer, x):
    return trainer.train(x, trainer.optimizer.param_groups[0]["lr"])


def returns_the_rate(trainer, x):
    return trainer.train(x), trainer.schedule.get_last_lr()[0]


def steps_and_returns_the_rate(trainer, x):
    loss = trainer.train(x)
    trainer.schedule.step()
    return loss, trainer.schedule.get_last_lr()[0]


def steps_and_scales_by_the_rate(trainer, x):
    loss = trainer.train(x)
    trainer.schedule.step()
    return loss * trainer.optimizer.param_groups[0]["lr"]


def steps_and_asks_for_the_epoch(trainer, x):
    loss = trainer.train(x)
    trainer.schedule.step()
    return loss, trainer.schedule.last_epoch > 6


def lowers_the_rate(trainer, x):
    loss = trainer.train(x)
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.9
    return loss


def asks_for_a_count(trainer, x):
    loss = trainer.train(x)
    return loss, bool(trainer.optimizer.state[trainer.net.weight]["step"] > 6)


def counts_in_a_tuple(trainer, x):
    trainer.pair = (trainer.pair[0] + 1, "steps")
    return trainer.train(x, 1.0 if trainer.pair[0] % 7 else 0.5)


def counts_in_numpy(trainer, x):
    trainer.number = trainer.number + np.int64(1)
    return trainer.train(x, 1.0 if trainer.number % 7 else 0.5)


def goes_to_another_phase(trainer, x):
    was, trainer.phase = trainer.phase, Phase.SECOND
    return trainer.train(x, was.value)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
READS = [
    (SGD, scales_by_the_rate, r"param_groups\[0\]\['lr'\] was 0.1 .* is now 0.05"),
    (SGD, returns_the_rate, r"get_last_lr\(\) was \(0.1,\) .* is now \(0.05,\)"),
    (SGD, steps_and_returns_the_rate, r"reads .*get_last_lr\(\), and steps a schedule"),
    (SGD, steps_and_scales_by_the_rate, r"reads .*param_groups\[0\]\['lr'\], and steps a"),
    (SGD, steps_and_asks_for_the_epoch, "reads .*schedule.last_epoch"),
    (SGD, lowers_the_rate, r"changes .*param_groups\[0\]\['lr'\] from"),
    (ADAM, asks_for_a_count, r"writes to .*state\[...\]\['step'\], which is on the host"),
    (SGD, counts_in_a_tuple, r"changes .*pair from \(1, 'steps'\) to \(2, 'steps'\)"),
    (SGD, counts_in_numpy, "changes .*number from .*1.* to .*2"),
]


class Halves(torch.optim.Optimizer):
    """Goes half as far in each sixth step; subclasses count the steps in different places."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.count = 0
        self.counts = {"steps": 0}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.05 if self.next(group, p) % 6 == 0 else 0.1)


class CountsInItself(Halves):
    def next(self, group, p):
        self.count += 1
        return self.count // 2


class CountsInATable(Halves):
    def next(self, group, p):
        self.counts["steps"] += 1
        return self.counts["steps"] // 2


class CountsInItsGroup(Halves):
    def next(self, group, p):
        group["steps"] = group.get("steps", 0) + 1
        return group["steps"] // 2


class CountsInItsState(Halves):
    def next(self, group, p):
        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        return self.state[p]["steps"]


OPTIMIZERS = [
    (CountsInItself, Trainer.train, "changes .*optimizer.count from"),
    (CountsInATable, Trainer.train, r"changes .*optimizer.counts\['steps'\] from"),
    (CountsInItsGroup, Trainer.train, "CountsInItsGroup changes 'steps' in its step"),
    (CountsInItsState, Trainer.train, "CountsInItsState changes 'steps' in its step"),
]


def numbers(tree):
    return torch.utils._pytree.tree_map(float, tree)


@pytest.mark.parametrize(("kind", "step", "match"), READS + OPTIMIZERS)
def test_numbers_that_a_replay_would_not_advance(kind, step, match):
    """The scheduler steps outside, unless the step does it; up to the refusal, results are the ordinary ones."""
    x = torch.ones(2, 3, device="xla")
    ordinary, trainer = Trainer(kind), Trainer(kind)
    captured = capture(lambda x: step(trainer, x))
    with pytest.raises(CaptureError, match=match):
        for _ in range(CALLS):
            assert numbers(captured(x)) == numbers(step(ordinary, x))
            for one in (ordinary, trainer):
                if not step.__name__.startswith("steps_and"):
                    one.schedule.step()


def test_a_phase_that_the_first_call_ends():
    """An enumeration's member is a constant: what the first recorded call would change, the second does not."""
    trainer = Trainer(torch.optim.SGD)
    captured = capture(lambda x: goes_to_another_phase(trainer, x), warmup=0)
    x = torch.ones(2, 3, device="xla")
    with pytest.raises(CaptureError, match=r"changes .*phase from .*FIRST.* to .*SECOND"):
        captured(x)


step = 0
"""As a script's loop has it, in which the captured function calls ``optimizer.step``."""


def test_a_global_variable_that_is_called_like_a_method(monkeypatch):
    trainer = Trainer(torch.optim.SGD)
    captured = capture(trainer.train)
    for number in range(CALLS):
        monkeypatch.setitem(globals(), "step", number)
        captured(torch.ones(2, 3, device="xla"))
    assert captured.recordings == 1


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's that keeps tensors only, and attributes that do not change."""

    def __init__(self, params, lr, sign=True):
        super().__init__(params, {"lr": lr, "beta": 0.9})
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["beta"])
                p.sub_(average.sign() if self.sign else average, alpha=group["lr"])


def test_an_optimizer_of_the_users_own_is_replayed():
    x = torch.ones(2, 3, device="xla")
    ordinary, trainer = Trainer(Lion), Trainer(Lion)
    captured = capture(trainer.train)
    for _ in range(CALLS):
        assert captured(x).item() == ordinary.train(x).item()
    assert captured.recordings == 1
    trainer.optimizer.sign = False
    with pytest.raises(CaptureError, match=r"sign was True .* and is now False"):
        captured(x)
    trainer.optimizer.sign = True
    trainer.optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(CaptureError, match=r"lr of Lion was 0.1 .* and is now 0.01"):
        captured(x)
