"""What a captured step writes goes from run to run by itself, and whoever looks at a tensor finds its value."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.contract import events
from xla_core.execution import runtime
from xla_core.recording.storage import LentStorage
from xla_core.testing.interrupts import Interrupt, Interrupted, passed_by

UNTIL_LENT = 7
LASTING = 8
"""Runs after which a loan counts as one that lasts, so that the next one comes as early."""


def ones(*shape):
    return torch.ones(*shape, device="xla", dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(*shape, device="xla", dtype=torch.float64)


def is_lent(tensor):
    return type(tensor._s) is LentStorage


class Counting:
    """A step that adds to two tensors; what they hold after so many steps is known."""

    def __init__(self):
        self.weight = zeros(3)
        self.total = zeros(3)
        self.step = capture(self.count)
        self.calls = 0

    def count(self, x):
        self.weight += x
        self.total += self.weight
        return self.total * 2

    def run(self, calls=1):
        result = None
        for _ in range(calls):
            result = self.step(ones(3))
            self.calls += 1
        return result

    def expected(self):
        return [float(self.calls)] * 3, [self.calls * (self.calls + 1) / 2] * 3

    def check(self):
        assert (self.weight.tolist(), self.total.tolist()) == self.expected()


@pytest.fixture
def lent():
    """A step whose tensors are lent."""
    one = Counting()
    one.run(UNTIL_LENT)
    assert is_lent(one.weight)
    assert is_lent(one.total)
    return one


def test_values_are_found_and_lent_again(lent):
    for calls in (0, 1, 2, 5, 8):
        lent.run(calls)
        lent.check()
        assert not is_lent(lent.weight)
    lent.run(UNTIL_LENT)
    assert is_lent(lent.weight)
    assert lent.run().tolist() == [2 * one for one in lent.expected()[1]]


def test_one_look_gives_all_tensors_their_buffers(lent):
    assert lent.weight.tolist() == lent.expected()[0]
    assert not is_lent(lent.total)
    lent.run()
    lent.check()


def in_place(t):
    t.mul_(0)


def through_a_view(t):
    t[:].zero_()


def overwritten(t):
    t.zero_()


def copied(t):
    t.copy_(torch.zeros(3))


def from_another(t):
    t.copy_(zeros(3) * 1)


def swapped_data(t):
    t.data.fill_(0)


@pytest.mark.parametrize(
    "write", [in_place, through_a_view, overwritten, copied, from_another, swapped_data]
)
def test_writes_from_outside_are_taken_up(lent, write):
    calls = lent.calls
    write(lent.weight)
    lent.run(2)
    assert lent.weight.tolist() == [2.0] * 3
    assert lent.total.tolist() == [calls * (calls + 1) / 2 + 3] * 3
    lent.run(UNTIL_LENT)
    assert lent.weight.tolist() == [2.0 + UNTIL_LENT] * 3


def test_tensors_that_a_step_only_reads_are_lent_too():
    weight = ones(3)
    step = capture(lambda x: x * weight)
    for factor in (1.0, 3.0, 9.0):
        for _ in range(UNTIL_LENT + LASTING):
            assert step(ones(3)).tolist() == [factor] * 3
        assert is_lent(weight)
        weight.mul_(3)
    assert weight.tolist() == [27.0] * 3


def test_what_is_looked_at_all_the_time_is_lent_less_and_less_often(lent):
    begun = 0
    for _ in range(200):
        was = is_lent(lent.weight)
        lent.run()
        begun += is_lent(lent.weight) and not was
        lent.check()
    assert begun <= 7
    while not is_lent(lent.weight):
        lent.run()
    lent.run(LASTING)
    lent.check()
    lent.run(3)
    assert is_lent(lent.weight)


def test_what_is_computed_from_a_lent_tensor_has_its_value_of_that_time(lent):
    weight, _ = lent.expected()
    doubled, shown, copy = lent.weight * 2, lent.weight[:2], lent.weight.clone()
    lent.run(3)
    assert doubled.tolist() == [2 * one for one in weight]
    assert copy.tolist() == weight
    assert shown.tolist() == lent.expected()[0][:2]


def test_an_argument_that_another_step_writes(lent):
    read = capture(lambda t: t + 1)
    for _ in range(UNTIL_LENT):
        lent.run()
        assert read(lent.weight).tolist() == [1 + one for one in lent.expected()[0]]
    lent.check()


def test_steps_that_write_the_same_tensors_take_turns():
    shared = zeros(2)
    added, doubled = capture(lambda x: shared.add_(x)), capture(lambda: shared.mul_(2))
    expected = 0.0
    for turn in range(9):
        for _ in range(turn):
            added(ones(2))
            expected += 1
        for _ in range(turn):
            doubled()
            expected *= 2
    assert shared.tolist() == [expected] * 2


def test_gradients_that_somebody_keeps_stay_as_they_were():
    layer = nn.Linear(2, 1, dtype=torch.float64).to("xla")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

    def step(x):
        optimizer.zero_grad()
        (layer(x) ** 2).sum().backward()
        optimizer.step()

    captured = capture(step)
    for _ in range(UNTIL_LENT):
        captured(ones(2))
    assert is_lent(layer.weight.grad)
    kept = layer.weight.grad.detach()
    for _ in range(3):
        captured(ones(2) * 3)
    assert kept.tolist() != layer.weight.grad.tolist()
    twin = nn.Linear(2, 1, dtype=torch.float64)
    twin.load_state_dict({k: v.cpu() for k, v in layer.state_dict().items()})
    layer.weight.grad = None
    captured(ones(2))
    (twin(torch.ones(2, dtype=torch.float64)) ** 2).sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), twin.weight.grad)


def test_a_tensor_that_is_dropped_is_missed(lent):
    lent.weight = zeros(3)
    with pytest.raises(CaptureError, match="weight"):
        lent.run()
    lent.step.reset()
    assert lent.total.tolist() == lent.expected()[1]


def test_memory_is_free_once_nothing_needs_it():
    size = 1 << 20

    def held():
        runtime.wait()
        return runtime.client().memory_info(0).bytes_used / (8 * size)

    gc.collect()
    before = held()
    weight, moment = zeros(size), zeros(size)
    step = capture(
        lambda x, weight=weight, moment=moment: (weight.add_(x), moment.add_(weight))[:0]
    )
    for _ in range(UNTIL_LENT):
        step(ones(1))
    assert is_lent(weight)
    assert round(held() - before) == 2
    del step, moment
    gc.collect()  # what has recorded the step
    assert is_lent(weight)
    assert torch.equal(weight.cpu(), torch.full((size,), UNTIL_LENT, dtype=torch.float64))
    assert round(held() - before) == 1
    del weight
    assert round(held() - before) == 0


def test_results_that_a_listener_keeps_are_not_given_away(lent):
    kept = []
    end = events.subscribe(events.ProgramExecuted, lambda event: kept.append(event.results))
    lent.run()
    end()
    results = kept[-1]
    values = [r.tolist() for r in results]
    lent.run(UNTIL_LENT)
    assert [r.tolist() for r in results] == values
    lent.check()


def test_another_thread_finds_values_of_one_step(lent):
    found = []
    stop = threading.Event()

    def look():
        while not stop.is_set():
            found.append(lent.weight.tolist())

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        lent.run()
    stop.set()
    thread.join()
    lent.check()
    seen = [one[0] for one in found]
    assert seen == sorted(seen)
    assert all(len(set(one)) == 1 for one in found)


def test_a_launch_that_fails_costs_what_it_took(lent, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr("xla_core.launching.program_launch.execution", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            lent.run()
    lent.check()
    lent.run(2)
    lent.check()


def one_schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)


def one_after_the_other(optimizer):
    schedules = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 8), one_schedule(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [8])


@pytest.mark.parametrize("make_schedule", [one_schedule, one_after_the_other])
def test_what_runs_on_the_host_goes_on_with_the_step_after_an_interrupt(make_schedule):
    """Counts of steps, the schedule and random numbers: a step that was not launched has advanced none."""

    def scheduled():
        parameter = torch.nn.Parameter(zeros(3))
        optimizer = torch.optim.Adam([parameter], lr=0.5)
        return parameter, optimizer, make_schedule(optimizer)

    weight, optimizer, schedule = scheduled()
    steps, noise = zeros(1), zeros(2)

    @capture
    def train(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        schedule.step()
        noise.copy_(torch.rand(2, device="xla"))
        steps.add_(1)

    x = ones(3)
    torch_xla.manual_seed(3)
    for _ in range(UNTIL_LENT + LASTING):
        train(x)
    places = list(passed_by(lambda: train(x)).places())
    fired, found = 0, {}
    for place in places[:: len(places) // 90]:
        try:
            with Interrupt(*place, lines=False):
                train(x)
        except Interrupted:
            fired += 1
        rate = float(optimizer.param_groups[0]["lr"])
        found[int(steps.item())] = optimizer.state[weight]["step"].item(), rate, noise.tolist()
        train(x)
        train(x)
    assert fired > 20
    _, other, same_schedule = scheduled()
    torch_xla.manual_seed(3)
    for done in range(1, max(found) + 1):
        other.step()
        same_schedule.step()
        drawn = torch.rand(2, device="xla").tolist()
        if done in found:
            assert found[done] == (done, float(other.param_groups[0]["lr"]), drawn)


@pytest.mark.parametrize("what", ["run", "look"])
def test_interrupted_at_any_bytecode(what):
    one = Counting()
    act = {"run": one.run, "look": one.weight.tolist}[what]

    def prepare():
        while not is_lent(one.weight):
            one.run()
        one.run(LASTING)

    prepare()
    passed = passed_by(act)
    fired = 0
    for place in passed.places():
        prepare()
        try:
            with Interrupt(*place, lines=False):
                act()
            continue
        except Interrupted:
            fired += 1
        torch_xla.sync()
        # a step that was launched counts, whether or not its call returned
        one.calls = int(one.weight[0].item())
        one.check()
    assert fired > 50
