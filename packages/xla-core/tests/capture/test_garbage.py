"""What is garbage when a recorded step ends is no result of it, and finding it costs no walk over all objects."""

from __future__ import annotations

import gc

import pytest
import torch

from torch_xla.experimental.capture import CaptureError, capture
from xla_core.support import counters


@pytest.fixture
def collections():
    """The generations that were collected since the test began."""
    generations = []

    def note(phase, info):
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


class Node:
    """A tensor in a reference cycle."""

    def __init__(self, value):
        self.value = value
        self.itself = self


def replays():
    return counters.all_counters().get("CapturedStepReplayed", 0)


def check_captured(step, count=5):
    """Run it so often; all calls but the warm-up and two recorded ones are replays, and right."""
    x = torch.arange(6.0).reshape(2, 3)
    captured = capture(step)
    before = replays()
    for number in range(count):
        torch.testing.assert_close(captured((x + number).to("xla")).cpu(), (x + number) * 2)
    assert replays() - before == count - 3


def test_recording_does_not_collect_all_objects(collections):
    net = torch.nn.Linear(3, 2).to("xla")
    optimizer = torch.optim.Adam(net.parameters())

    def step(x):
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    captured = capture(step)
    x = torch.ones(4, 3, device="xla")
    captured(x)
    gc.collect()
    del collections[:]
    before = replays()
    for _ in range(3):
        captured(x)
    assert replays() - before == 1
    assert 1 in collections and 2 not in collections


def test_young_garbage_is_no_result(collections):
    def step(x):
        Node(x + 1)
        return x * 2

    check_captured(step)
    assert 2 not in collections


@pytest.mark.parametrize("made", [lambda x: x + 1, torch.clone], ids=["result", "copy"])
def test_garbage_that_has_grown_old_is_no_result(collections, made):
    def step(x):
        node = Node(made(x))
        gc.collect(1)  # as one that runs by itself in a large step
        del node
        return x * 2

    check_captured(step)
    assert 2 in collections


@pytest.mark.parametrize("written", [False, True])
def test_a_copied_value_in_old_garbage_is_no_result(collections, written):
    def step(x):
        node = Node(torch.tensor([2.0]).to(x.device))
        gc.collect(1)
        if written:
            node.value.add_(1).sub_(1)
        result = x * node.value
        del node
        return result

    check_captured(step)
    assert (2 in collections) == written  # what is only read is an input, and no result


def test_a_copied_value_that_nothing_computes_with_may_be_in_old_garbage(collections):
    def step(x):
        node = Node(torch.tensor([2.0]).to(x.device))
        gc.collect(1)
        del node
        return x * 2

    check_captured(step)
    assert 2 in collections


def test_what_is_kept_is_refused_as_before(collections):
    kept = []

    def step(x):
        kept.append(x + 1)
        return x * 2

    captured = capture(step)
    x = torch.ones(2, device="xla")
    with pytest.raises(CaptureError, match="changes kept from 1 items to 2 items"):
        for _ in range(4):
            captured(x)
    assert 2 in collections
