"""Trees of steps that grew too large are dropped, and no report keeps them."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla
from xla_core.extension_api import runtime
from xla_core.testing.internals import Root, limit_remembered_entries
from xla_debug import memory

MOST = 100  # entries of a tree in this test


def _step_with(size):
    y = torch.zeros(size, device="xla")  # a step of its own from its first entry on
    for _ in range(20):
        y = y + 1
    torch_xla.sync()


def _trees():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Root]


@pytest.fixture
def small_trees():
    """Within the test a tree of more than ``MOST`` entries is dropped."""
    former = limit_remembered_entries(MOST)
    yield
    limit_remembered_entries(former)


@pytest.mark.usefixtures("small_trees", "all_objects")
def test_a_dropped_tree_of_steps_is_not_held():
    trace = runtime.trace_of(None)
    torch_xla.sync()
    trace.forget()
    # a compiled graph of an earlier test may hold one
    former = [tree for tree in _trees() if tree is not trace.root]
    dropped = 0
    with memory.tracking():
        for size in range(2, 40):
            tree = trace.root
            _step_with(size)
            dropped += trace.root is not tree
        del tree
        assert dropped > 2
        # the step that makes a tree too large is reported once it has run, after the tree was dropped
        assert len(_trees()) <= len(former) + 2
