"""Random programs as captured steps: what is accepted is what ordinary steps compute, to the last bit.

A program's body is the step, run on the tensors that its setup made, its state, and on tensors from the host,
its arguments. What a step may not do (reads, tensors that are left behind, other shapes for the state) is left out.
"""

from __future__ import annotations

import gc
import re

import pytest
import torch

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.support import counters
from xla_core.testing.program_parts.machine import Machine
from xla_core.testing.random_programs import make_program

DEVICE = torch.device("xla:0")
LEFT_OUT = {
    "sync", "observe", "observe_all", "read_item", "text", "garbage", "capture", "copy_host", "swap",
    "t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "set_", "set_data",
}  # fmt: skip
FROM_THE_HOST = {"input", "positions"}
CALLS = 16
LOOKED_AT = {0, 3, 4, 9, 11, 15}
"""Calls after which the state is read; in between, replays pass it on from one to the next."""
WRITTEN = {4, 8}
"""Calls after which it is written from outside."""
FROZEN = 6
"""The call after which what wants gradients wants none, and the other way round."""
CLEARED = {8, 10, 12, 14}
"""Calls after which gradients are cleared from outside: the last call is a replay that finds none."""
SWEEP = 600


def nothing():
    """In place of a sync."""


def seen(tensors):
    """Values, and those of gradients."""
    found = []
    for t in tensors:
        found.append(t.detach().cpu())
        found.append(t.grad.cpu() if t.is_leaf and t.grad is not None else None)
    return found


def write(tensors):
    """Halve the numbers that a tensor has by itself, as ``expand`` repeats some."""
    with torch.no_grad():
        for t in tensors:
            if t.is_floating_point() and t.is_contiguous():
                t.detach().mul_(0.5)


def turn(tensors):
    """Turn ``requires_grad`` of the first tensor that may have a gradient of its own."""
    for t in tensors:
        if t.is_floating_point() and t.is_leaf and t._base is None:
            t.requires_grad_(not t.requires_grad)
            return


def clear(tensors):
    """Take gradients away."""
    for t in tensors:
        if t.is_leaf:
            t.grad = None


def anew(step, arguments):
    """A call that, if a replay is refused, is recorded like a first one."""
    try:
        return step(arguments)
    except CaptureError:
        step.reset()
        return step(arguments)


def trajectory(seed, captured):
    """What some calls of the step return, and what state they leave."""
    program = make_program(seed)
    setup = Machine(DEVICE, nothing)
    for instruction in program.setup:
        setup.execute(instruction)
    state = dict(setup.slots)
    made = [i for i in program.body if i.target in FROM_THE_HOST]
    body = tuple(i for i in program.body if i.target not in LEFT_OUT | FROM_THE_HOST)

    def step(arguments):
        machine = Machine(DEVICE, nothing)
        machine.slots = state | arguments
        for instruction in body:
            machine.execute(instruction)
        return [machine.slots[number] for number in sorted(machine.slots)]

    called = capture(step) if captured else step
    found = []
    for call in range(CALLS):
        source = Machine(DEVICE, nothing)
        source.iteration = call
        for instruction in made:
            source.execute(instruction)
        arguments = source.slots
        after_a_turn = captured and call == FROZEN + 1
        results = anew(called, arguments) if after_a_turn else called(arguments)
        torch_xla.sync()
        found.append((seen(results), seen(arguments.values())))
        if call in LOOKED_AT:
            found.append(seen(state.values()))
        if call in WRITTEN:
            write(state.values())
        if call in CLEARED:
            clear(state.values())
        if call == FROZEN:
            turn(state.values())
        del results, source, arguments
    return found


def equal(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b


def accepted(seeds):
    """How many of the programs were replayed; each of these equals ordinary steps."""
    count = 0
    for seed in seeds:
        gc.collect()
        before = counters.all_counters().get("CapturedStepReplayed", 0)
        try:
            found = trajectory(seed, True)
        except CaptureError:
            continue
        except RuntimeError as error:
            # a view that is stale by autograd's rules: looking at it raises, captured or not
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                trajectory(seed, False)
            continue
        finally:
            torch_xla.sync()
        if counters.all_counters().get("CapturedStepReplayed", 0) == before:
            continue
        assert equal(found, trajectory(seed, False)), make_program(seed)
        count += 1
    return count


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_random_programs(first):
    assert accepted(range(first, first + 10)) >= 4


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1000, 1000 + SWEEP, 20))
def test_many_random_programs(first):
    accepted(range(first, first + 20))
