"""Gradients that captured steps find, add to, take and clear: ``backward`` and the optimizer's step apart."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.contract import events
from xla_core.execution import run_step
from xla_core.support import counters
from xla_core.testing.interrupts import Interrupt, Interrupted, Passed

DEVICE = "xla"


def ones(*shape):
    return torch.ones(*shape, device=DEVICE)


def replays():
    return counters.all_counters().get("CapturedStepReplayed", 0)


def in_replays(call, *args):
    """The result of a call, and the number of steps that it replayed."""
    before = replays()
    result = call(*args)
    return result, replays() - before


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator))
        for _ in range(count)
    ]


class Accumulating:
    """Gradients of several batches are added up, then the optimizer takes a step."""

    def __init__(self, every, to_none=True):
        torch.manual_seed(0)
        torch_xla.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)).to(
            DEVICE
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.every = every
        self.to_none = to_none

    def backward(self, x, y):
        loss = F.mse_loss(self.net(x), y) / self.every
        loss.backward()
        return loss

    def update(self):
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.to_none)
        return norm

    def step(self, x, y, last):
        loss = self.backward(x, y)
        return (loss, self.update()) if last else (loss,)

    def capture(self, *names, **options):
        for name in names:
            setattr(self, name, capture(getattr(self, name), **options))
        return self

    def train(self, count):
        """What each call returned, and the gradients after it."""
        seen = []
        for i, (x, y) in enumerate(batches(count)):
            seen.append(self.backward(x.to(DEVICE), y.to(DEVICE)).detach())
            seen += self.gradients()
            if i % self.every == self.every - 1:
                seen.append(self.update())
                seen += self.gradients()
            torch_xla.sync()
        return [None if one is None else one.cpu() for one in (*seen, *self.net.parameters())]

    def gradients(self):
        return [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "captured", [("backward",), ("update",), ("backward", "update")], ids="+".join
)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_accumulated_gradients(every, captured, to_none):
    expected = Accumulating(every, to_none).train(24)
    assert_same(Accumulating(every, to_none).capture(*captured).train(24), expected)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_calls_with_and_without_gradients_have_recordings_of_their_own(every):
    run = Accumulating(every).capture("backward", "update")
    run.train(4 * every + 3 * every)
    assert (run.backward.recordings, run.update.recordings) == (1 if every == 1 else 2, 1)
    before = replays()
    run.train(2 * every)
    assert replays() - before == 2 * every + 2


def test_a_step_that_updates_in_some_calls():
    def train(captured):
        run, seen = Accumulating(3), []
        if captured:
            run.capture("step")
        for i, (x, y) in enumerate(batches(24)):
            results, replayed = in_replays(run.step, x.to(DEVICE), y.to(DEVICE), i % 3 == 2)
            seen += [t.detach() for t in results]
            torch_xla.sync()
        return [t.cpu() for t in (*seen, *run.net.parameters())], replayed

    expected, _ = train(False)
    found, replayed = train(True)
    assert_same(found, expected)
    assert replayed == 1


@pytest.mark.parametrize("every", [1, 3])
def test_checked_while_gradients_are_accumulated(every):
    expected = Accumulating(every).train(24)
    run = Accumulating(every).capture("backward", "update", check_every=2)
    assert_same(run.train(24), expected)


@pytest.mark.parametrize("before", [True, False])
def test_gradients_from_outside_are_cleared_by_the_step(before):
    """Whether or not the recorded calls found gradients, a step that clears them does so in a replay."""

    def train(captured):
        net, other = nn.Linear(3, 2).to(DEVICE), nn.Linear(3, 2).to(DEVICE)
        nn.init.ones_(net.weight)

        def step(x):
            net.zero_grad()
            return other(x)

        step = capture(step) if captured else step
        seen = []
        for i in range(10):
            if before or i >= 5:
                net(ones(2, 3)).sum().backward()
            step(ones(2, 3))
            seen.append(net.weight.grad)
            net(ones(1, 3)).sum().backward()
            seen.append(net.weight.grad.cpu())
            if not before and i < 5:
                net.zero_grad()
        return seen

    assert_same(train(True), train(False))


def test_only_gradients_that_code_looks_at_separate_recordings():
    """A step that clears gradients and fills them does the same whether it finds some or not."""
    net = nn.Linear(3, 2).to(DEVICE)

    def step(x):
        net.zero_grad()
        net(x).sum().backward()

    step = capture(step)
    for _ in range(4):
        step(ones(2, 3))
    assert in_replays(step, ones(2, 3))[1] == 1
    net.zero_grad()
    assert in_replays(step, ones(2, 3))[1] == 1
    assert net.weight.grad.tolist() == [[2.0] * 3] * 2
    assert step.recordings == 1


def test_parameters_of_which_some_have_gradients():
    """Only one of two layers takes part in a call; both are added up."""

    def train(captured):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4).to(DEVICE) for _ in range(2)]
        optimizer = torch.optim.SGD([p for one in layers for p in one.parameters()], lr=0.1)

        def backward(x, number):
            layers[number](x).pow(2).mean().backward()

        def update():
            optimizer.step()
            optimizer.zero_grad()

        step, end = (capture(backward), capture(update)) if captured else (backward, update)
        generator = torch.Generator().manual_seed(2)
        for i in range(40):
            step(torch.randn(3, 4, generator=generator).to(DEVICE), (i // 3) % 2)
            if i % 4 == 3:
                end()
            torch_xla.sync()
        return [p.cpu() for one in layers for p in one.parameters()]

    assert_same(train(True), train(False))


def test_gradients_of_another_object_in_each_call():
    """An optimizer's step is captured, gradients come from ordinary code, and one is a new tensor of the user's."""

    def train(captured):
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        update = capture(optimizer.step) if captured else optimizer.step
        replayed = 0
        for x, y in batches(8):
            optimizer.zero_grad()
            F.mse_loss(net(x.to(DEVICE)), y.to(DEVICE)).backward()
            net.bias.grad = net.bias.grad * 2
            replayed = in_replays(update)[1]
            torch_xla.sync()
        return [p.cpu() for p in net.parameters()], replayed

    found, replayed = train(True)
    assert_same(found, train(False)[0])
    assert replayed == 1


def test_a_gradient_that_somebody_keeps_is_written_in_place():
    """As in ordinary steps: what is added to is the tensor that the parameter has."""

    def train(captured):
        net = nn.Linear(3, 2).to(DEVICE)

        def backward(x):
            net(x).sum().backward()

        step = capture(backward) if captured else backward
        kept = []
        for i in range(12):
            step(ones(2, 3))
            torch_xla.sync()
            kept.append(net.weight.grad)
            if i % 4 == 3:
                net.zero_grad()
        return [g.cpu() for g in kept]

    assert_same(train(True), train(False))


def test_a_gradient_that_is_returned_is_the_parameters_own():
    net = nn.Linear(3, 2).to(DEVICE)

    @capture
    def backward(x):
        net(x).sum().backward()
        return net.weight.grad

    net(ones(2, 3)).sum().backward()
    for number in range(2, 12):
        returned = backward(ones(2, 3))
        assert returned is net.weight.grad
        assert returned[0, 0].item() == 2.0 * number
        if number % 4 == 0:
            net.weight.grad = returned.clone()
    assert backward.recordings == 1


def test_a_gradient_of_another_kind():
    net = nn.Linear(3, 2).to(DEVICE)

    @capture
    def backward(x):
        net(x).sum().backward()

    for _ in range(5):
        backward(ones(2, 3))
    net.weight.grad = ones(3, 2).t()
    with pytest.raises(
        CaptureError, match=r"the gradient of a parameter of \(2, 3\) is not a tensor"
    ):
        backward(ones(2, 3))
    net.weight.grad = torch.zeros(2, 3, device=DEVICE)
    backward(ones(2, 3))
    assert net.weight.grad.tolist() == [[2.0] * 3] * 2


def test_a_gradient_that_the_step_also_reaches_otherwise():
    net = nn.Linear(3, 2, bias=False).to(DEVICE)
    held = []

    @capture
    def backward(x):
        net(x).sum().backward()
        return held[0] * 2

    net(ones(2, 3)).sum().backward()
    held.append(net.weight.grad)
    for _ in range(5):
        result = backward(ones(2, 3))
    assert result.tolist() == [[24.0] * 3] * 2
    net.weight.grad = torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(CaptureError, match="the gradient of a parameter"):
        backward(ones(2, 3))


def test_a_gradient_that_is_reached_otherwise_and_cleared():
    net = nn.Linear(3, 2, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    held = [ones(2, 3)]

    @capture
    def update():
        optimizer.step()
        optimizer.zero_grad()
        return held[0] * 2

    for _ in range(5):
        net.weight.grad = held[0]
        update()
    assert net.weight.grad is None
    net.weight.grad = ones(2, 3)
    with pytest.raises(CaptureError, match="the gradient of a parameter"):
        update()


def test_gradients_that_one_call_clears_and_the_next_keeps():
    net = nn.Linear(3, 2).to(DEVICE)
    flags = iter([True, True, False, True, False])

    def step(x):
        y = net(x)
        if next(flags):
            net.zero_grad()
        return y * 2

    step = capture(step)

    def play():
        for _ in range(5):
            net(ones(2, 3)).sum().backward()
            step(ones(2, 3))

    with pytest.raises(CaptureError, match="the step gave a parameter of"):
        play()


def test_recordings_for_gradients_count_among_those_allowed():
    layers = [nn.Linear(3, 2).to(DEVICE) for _ in range(4)]

    def step(x):
        sum(one(x).sum() for one in layers).backward()

    step = capture(step, max_recordings=2)

    def play():
        for one in [None, *layers]:
            for _ in range(4):
                if one is not None:
                    one.zero_grad()
                step(ones(2, 3))

    with pytest.raises(CaptureError, match="with and without gradients"):
        play()


def test_former_gradients_are_free_before_new_ones_are_computed(monkeypatch):
    run = Accumulating(2).capture("backward", "update")
    run.train(16)
    x, y = (t.to(DEVICE) for t in batches(1)[0])
    run.backward(x, y)
    run.backward(x, y)
    storage = weakref.ref(run.net[0].weight.grad._s)
    run.update()
    former = weakref.ref(storage().buffer)
    launch, alive = run_step.launch, []

    def launched(*args, **kwargs):
        alive.append(former() is not None)
        launch(*args, **kwargs)

    monkeypatch.setattr(run_step, "launch", launched)
    assert in_replays(run.backward, x, y)[1] == 1
    assert alive == [False]


@pytest.mark.parametrize("what", ["the first", "one more", "take"])
def test_interrupted_at_any_bytecode(what):
    """A step that was launched counts, whether or not its call returned; one that was not leaves no trace."""
    net = nn.Linear(3, 2, bias=False).to(DEVICE)
    total, row = torch.zeros(2, 3, device=DEVICE), ones(1, 3)

    def backward(x):
        net(x).sum().backward()

    def take():
        total.add_(net.weight.grad)
        net.zero_grad()

    backward, take = capture(backward), capture(take)

    def act():
        take() if what == "take" else backward(row)

    def state():
        grad = net.weight.grad
        values = {0.0} if grad is None else set(grad.flatten().tolist())
        assert len(values) == 1
        return total[0, 0].item(), *values

    def prepare():
        """What has been taken, and the gradient, before a call of ``act``."""
        if net.weight.grad is not None:
            take()
        if what != "the first":
            backward(row)
        torch_xla.sync()
        return state()

    for _ in range(6):
        prepare()
        act()
    prepare()
    assert in_replays(act)[1] == 1
    passed = Passed()
    for _ in range(2):  # as ``passed_by`` does
        prepare()
        passed.counts.clear()
        with passed:
            act()
    launched = []
    for place in passed.places(("first",)):
        sum_before, grad = prepare()
        ran = []
        unsubscribe = events.subscribe(events.ProgramExecuted, ran.append)
        try:
            with Interrupt(*place, lines=False):
                act()
            continue
        except Interrupted:
            after = state()
        finally:
            unsubscribe()
        done = (sum_before + grad, 0.0) if what == "take" else (sum_before, grad + 1)
        assert after == done or (after == (sum_before, grad) and not ran)
        launched.append(after == done)
    # places are in the order in which they were passed
    assert launched == sorted(launched)
    assert launched.count(False) > 50
    assert launched.count(True) > 20
