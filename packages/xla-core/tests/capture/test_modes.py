"""Steps that switch modules between training and evaluation themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.support import counters

DEVICE = "xla"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(F.dropout(self.norm(self.first(x)), 0.3, self.training))


class Run:
    """A training step and an evaluation, each of which sets its mode."""

    def __init__(self):
        torch.manual_seed(0)
        torch_xla.manual_seed(0)
        self.net = Net().to(DEVICE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.001)

    def train(self, x):
        self.net.train()
        return self.train_as_it_is(x)

    def train_with_frozen_statistics(self, x):
        self.net.train()
        self.net.norm.eval()
        return self.train_as_it_is(x)

    def train_as_it_is(self, x):
        self.optimizer.zero_grad()
        loss = self.net(x).pow(2).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def evaluate(self, x):
        self.net.eval()
        with torch.no_grad():
            return self.net(x).sum()

    def evaluate_in_between(self, x):
        was = self.net.training
        self.net.eval()
        with torch.no_grad():
            result = self.net(x).sum()
        self.net.train(was)
        return result

    def modes(self):
        return [module.training for module in self.net.modules()]


def played(captured, train, evaluate, first=0, outside=None):
    """The results, the modes after each call, and how many steps were replayed."""
    run = Run()
    step, test = getattr(run, train), getattr(run, evaluate)
    if captured:
        step, test = capture(step), capture(test)
    before = counters.all_counters().get("CapturedStepReplayed", 0)
    found = []
    for number in range(24):
        x = torch.full((6, 4), number / 10.0).to(DEVICE) + torch.arange(4.0).to(DEVICE)
        found.append(step(x).item())
        found.append(run.modes())
        if number >= first and number % 3 == 2:
            found.append(test(x).item())
            found.append(run.modes())
            if outside is not None:
                run.net.train(outside)
    found += [t.tolist() for t in (*run.net.parameters(), *run.net.buffers())]
    return found, counters.all_counters().get("CapturedStepReplayed", 0) - before


@pytest.mark.parametrize("outside", [None, True, False])
@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("evaluate", ["evaluate", "evaluate_in_between"])
@pytest.mark.parametrize("train", ["train", "train_with_frozen_statistics"])
def test_steps_that_set_modes(train, evaluate, first, outside):
    found, replayed = played(True, train, evaluate, first, outside)
    expected, _ = played(False, train, evaluate, first, outside)
    assert found == expected
    assert replayed >= 15


def test_a_mode_that_the_step_does_not_set_is_refused():
    with pytest.raises(CaptureError, match=r"training was True when the step was recorded"):
        played(True, "train_as_it_is", "evaluate", 10)


def test_calls_that_leave_other_modes():
    net = Net().to(DEVICE)
    modes = iter([True, True, False, True])

    @capture
    def step(x):
        result = net(x).sum()
        net.train(next(modes))
        return result

    def play():
        for _ in range(4):
            net.train()
            step(torch.ones(6, 4))

    with pytest.raises(CaptureError, match=r"the mode of Net \(training\)"):
        play()


def test_a_mode_that_only_the_second_recorded_call_sets():
    """What a call may switch is known from the calls before it."""
    net = Net().to(DEVICE)
    calls = iter(range(20))

    def switch():
        net.train()

    def step(x):
        if next(calls) == 2:
            switch()
        return net(x).sum()

    step = capture(step)
    x = torch.ones(6, 4)
    for _ in range(4):
        step(x)
    net.eval()
    expected = net(x.to(DEVICE)).sum().item()
    assert step(x).item() == expected
