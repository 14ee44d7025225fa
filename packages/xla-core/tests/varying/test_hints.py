"""Marks of dimensions that vary: earlier, with an upper bound, and without the environment variable."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from torch_xla import _XLAC
from torch_xla.experimental import mark_dynamic
from xla_core.varying import families


@pytest.fixture
def run(varying, monkeypatch, counted):
    """Runs a step once per length with a mark, without the variable; how many were served, and programs made."""
    monkeypatch.delenv("XLA_VARYING_SHAPES")

    def run(mark, lengths):
        before = counted(families.SERVED), counted(families.PROGRAMS)
        for length in lengths:
            rows = torch.arange(4.0 * length).reshape(4, length).sin()
            x = rows.to("xla")
            mark(x)
            y = x.softmax(1).cumsum(1) * x.mean()
            torch_xla.sync()
            torch.testing.assert_close(y.cpu(), rows.softmax(1).cumsum(1) * rows.mean())
        return counted(families.SERVED) - before[0], counted(families.PROGRAMS) - before[1]

    return run


def test_a_marked_dimension_is_served_from_the_second_size_on(run):
    assert run(lambda x: mark_dynamic(x, 1), (5, 9, 7, 8)) == (3, 1)
    assert run(lambda x: _XLAC._xla_mark_dynamic(x, -1), (50, 90, 70)) == (
        3,
        2,
    )  # it is known by now


def test_without_a_mark_nothing_is_served(run):
    assert run(lambda x: None, (5, 9, 7, 6)) == (0, 0)


def test_no_program_is_made_for_sizes_beyond_the_bound(run):
    # 20 would be rounded to 24, and 23 is compiled for itself
    sizes = []

    def mark(x):
        if x.shape[1] <= 21:
            mark_dynamic(x, 1, max=21)
        sizes.append(x.shape[1])

    assert run(mark, (5, 20, 21, 23)) == (2, 1)


def test_what_cannot_be_marked():
    x = torch.ones(3, 4, device="xla")
    with pytest.raises(TypeError, match="not an xla tensor"):
        mark_dynamic(torch.ones(3), 0)
    with pytest.raises(RuntimeError, match="mark the tensor that it shows"):
        mark_dynamic(x[1:], 0)
    with pytest.raises(IndexError, match="no dimension 2"):
        mark_dynamic(x, 2)
    with pytest.raises(ValueError, match="max=2 is below the size 3"):
        mark_dynamic(x, 0, max=2)
