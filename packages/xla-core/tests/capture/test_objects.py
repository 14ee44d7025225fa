"""What a captured step keeps in objects of the user's classes: with or without ``__slots__``, replaced or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from torch_xla.experimental.capture import CaptureError, capture


@dataclasses.dataclass
class Plain:
    count: Any
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    count: Any
    inner: Any = None


def dictionary(count, inner=None):
    return {"count": count, "inner": inner}


def items(count, inner=None):
    return [count, inner]


def part(state, name):
    """One of the two parts of what the above make."""
    if isinstance(state, list):
        return state[name == "inner"]
    return state[name] if isinstance(state, dict) else getattr(state, name)


KINDS = [Plain, Slotted, dictionary, items]


class Counting:
    def __init__(self, make):
        self.make = make
        self.state = make(0)

    def step(self, x):
        self.state = self.make(part(self.state, "count") + 1)
        return x * 2


class CountingInside(Counting):
    def __init__(self, make, outer):
        super().__init__(make)
        self.outer = outer
        self.state = outer("same", make(0))

    def step(self, x):
        count = part(part(self.state, "inner"), "count")
        self.state = self.outer("same", self.make(count + 1))
        return x * 2


class CountingInItself(Counting):
    def step(self, x):
        self.state = self.make(part(self.state, "count") + 1)
        self.state.inner = self.state
        return x * 2


def ones(*shape):
    return torch.ones(*shape, device="xla")


@pytest.mark.parametrize(
    "kind, make",
    [*((Counting, make) for make in KINDS), (CountingInItself, Plain), (CountingInItself, Slotted)],
)
def test_a_counter_in_an_object_that_each_call_replaces(kind, make):
    step = capture(kind(make).step)
    step(ones(2))
    with pytest.raises(CaptureError, match=r"changes self\.state.* from 1 to 2"):
        step(ones(2))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_a_counter_in_an_object_of_an_object_that_each_call_replaces(outer, make):
    step = capture(CountingInside(make, outer).step)
    step(ones(2))
    with pytest.raises(CaptureError, match=r"changes self\.state.* from 1 to 2"):
        step(ones(2))


@pytest.mark.parametrize("make", KINDS)
def test_an_object_that_each_call_makes_anew_with_the_same_contents(make):
    class Scratch:
        def __init__(self):
            self.state = make(0)

        def step(self, x):
            self.state = make(3, make(2))
            return x * part(part(self.state, "inner"), "count")

    step = capture(Scratch().step)
    assert [step(ones(2)).tolist() for _ in range(6)] == [[2.0, 2.0]] * 6
    assert step.recordings == 1


@pytest.mark.parametrize("make", KINDS)
def test_a_tensor_in_an_object_that_each_call_replaces(make):
    class Recurrent:
        def __init__(self):
            self.state = make(ones(2))

        def step(self, x):
            self.state = make(part(self.state, "count") + x)
            return x * 2

    step = capture(Recurrent().step)
    step(ones(2))
    with pytest.raises(CaptureError, match=r"another tensor|another object|keeps a new tensor"):
        for _ in range(3):
            step(ones(2))


@dataclasses.dataclass(slots=True)
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    numbers: Any


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Training(model, optimizer, schedule, Slotted(2.0, Plain([1, 3.0])))


def step_of(run):
    def step(x):
        run.optimizer.zero_grad()
        loss = (run.model(x) * run.numbers.count * run.numbers.inner.count[1]).sum()
        loss.backward()
        run.optimizer.step()
        run.schedule.step()
        return loss

    return step


def test_a_training_step_over_an_object_with_slots():
    ordinary, captured = training(), training()
    steps = step_of(ordinary), capture(step_of(captured))
    losses = []
    for step in steps:
        torch.manual_seed(1)
        losses.append([step(ones(2, 3)).item() for _ in range(7)])
    assert losses[0] == losses[1] and steps[1].recordings == 1
    assert ordinary.schedule.state_dict() == captured.schedule.state_dict()
    for one, other in zip(ordinary.model.parameters(), captured.model.parameters(), strict=True):
        assert torch.equal(one, other)


def _scale(run):
    run.numbers.count = 4.0


def _item(run):
    run.numbers.inner.count[1] = 7.0


def _object(run):
    run.numbers = Slotted(5.0, run.numbers.inner)


def _weight(run):
    run.model[0].weight = nn.Parameter(ones(3, 3))


@pytest.mark.parametrize(
    "change, named",
    [
        (_scale, r"run\.numbers\.count was 2\.0"),
        (_item, r"run\.numbers\.inner\.count\[1\] was 3\.0"),
        (_object, r"run\.numbers is no longer"),
        (_weight, r"run\.model\.0\.weight is no longer"),
        (lambda run: run.model.eval(), r"run\.model\.training was True"),
        (lambda run: run.model[0].requires_grad_(False), r"weight\.requires_grad was True"),
        (
            lambda run: run.model[0].register_forward_hook(lambda *_: None),
            r"run\.model has other hooks",
        ),
    ],
)
def test_what_is_behind_slots_is_watched(change, named):
    run = training()
    step = capture(step_of(run))
    for _ in range(5):
        step(ones(2, 3))
    change(run)
    with pytest.raises(CaptureError, match=named):
        step(ones(2, 3))
