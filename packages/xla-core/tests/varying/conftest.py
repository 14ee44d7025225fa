"""What the tests of varying shapes share: the feature turned on, and padding that shows where it is read."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from xla_core.support import caches, counters
from xla_core.testing.lengths.programs import junk_as_padding
from xla_core.varying import families


@pytest.fixture
def turned_on(monkeypatch):
    """Varying shapes are on, and nothing is known of any."""
    monkeypatch.setenv("XLA_VARYING_SHAPES", "1")
    # what is compared does not depend on how well programs are compiled, and training takes a third of the time
    monkeypatch.setenv("XLA_COMPILE_EFFORT", "fast")
    caches.clear_all()
    yield
    caches.clear_all()


@pytest.fixture
def varying(turned_on):
    """``turned_on``; padding is NaN, or a number that is no index, so that whatever reads it shows."""
    with junk_as_padding():
        yield


def _counted(name):
    return counters.all_counters().get(name, 0)


@pytest.fixture
def counted():
    """A function that says how often something was counted so far."""
    return _counted


@pytest.fixture
def run_lengths(varying):
    """A function that runs a step once per length, on the device and the CPU, and says how many were served.

    ``make(length)`` gives the operands.
    """

    def run(step, make, lengths, tolerance=None):
        before = _counted(families.SERVED)
        for length in lengths:
            operands = make(length)
            wanted = step(*operands)
            results = step(*(operand.to("xla") for operand in operands))
            torch_xla.sync()
            near = tolerance or {"rtol": 1e-4, "atol": 1e-5}
            if isinstance(wanted, torch.Tensor) and not wanted.is_floating_point():
                near = {"rtol": 0, "atol": 0}
            torch.testing.assert_close(_on_cpu(results), wanted, **near)
        return _counted(families.SERVED) - before

    return run


def _on_cpu(results):
    if isinstance(results, torch.Tensor):
        return results.cpu()
    return type(results)(map(_on_cpu, results))
