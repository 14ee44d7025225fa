"""Steps that cannot be computed: what they cost, what is said, and that the next step runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_xla
from xla_core.execution import run_step, runtime
from xla_core.operators import lowering_registry
from xla_core.recording import xla_tensor

HUGE = 1 << 22
"""A square of float32 of 64 TB: more than any machine's address space grants."""


@pytest.fixture
def weight():
    made = torch.ones(3, device="xla")
    torch_xla.sync()
    return made


def usable(weight, expected):
    assert weight.tolist() == expected
    weight.mul_(2)
    torch_xla.sync()
    assert weight.tolist() == [2 * e for e in expected]


def test_out_of_memory_names_the_lines_of_the_largest_values_and_costs_only_the_step(weight):
    row = torch.ones(1, HUGE, device="xla")
    torch_xla.sync()
    weight.add_(1)
    big = row.t() + row  # this line
    loss = big.exp().sum() * 0 + big[0, 0]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch_xla.sync()
    text = str(caught.value)
    assert "RESOURCE_EXHAUSTED" in text and "What helps" in text
    line = test_out_of_memory_names_the_lines_of_the_largest_values_and_costs_only_the_step
    number = line.__code__.co_firstlineno + 4
    assert f"64.00TB float32[{HUGE},{HUGE}]" in text
    assert f"test_failures.py:{number}" in text
    with pytest.raises(RuntimeError, match="never computed"):
        loss.item()
    usable(weight, [1, 1, 1])


def test_a_program_that_xla_refuses_costs_only_its_step(weight, monkeypatch):
    kept = weight * 5
    torch_xla.sync()
    weight.add_(1)
    gone = weight * 3.5

    def refuse(_program):
        raise RuntimeError("UNIMPLEMENTED: not on this device")

    with monkeypatch.context() as patch:
        patch.setattr(runtime.client(), "compile", refuse)
        with pytest.raises(RuntimeError, match="not on this device"):
            torch_xla.sync()
    torch_xla.sync()
    assert kept.tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError, match=r"never computed.*not on this device"):
        gone.tolist()
    usable(weight, [1, 1, 1])


def test_a_launch_that_fails_costs_only_its_step(weight, monkeypatch):
    weight.add_(1)
    gone = weight * 4.5

    def fail(*_args, **_keywords):
        raise RuntimeError("INTERNAL: the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(run_step, "execution", lambda *_: map(fail, (1,)))
        with pytest.raises(RuntimeError, match="the device is gone"):
            torch_xla.sync()
    with pytest.raises(RuntimeError, match=r"never computed.*the device is gone"):
        gone.tolist()
    usable(weight, [1, 1, 1])


@pytest.fixture
def picky_digamma(monkeypatch):
    """An operator whose lowering rule fails for two elements only."""
    overload = torch.ops.aten.digamma.default
    rule = lowering_registry.find_rule(overload)

    def picky(x):
        if x.shape == (2,):
            raise ValueError("no such luck")
        return rule.function(x)

    changed = dataclasses.replace(rule, function=picky)
    monkeypatch.setitem(lowering_registry._rules, overload, changed)
    monkeypatch.setattr(xla_tensor, "handlers", {})  # those made before have the rule that works
    monkeypatch.setattr(xla_tensor, "_plain", {})


def test_a_failed_lowering_names_the_line_and_spares_the_operator_elsewhere(weight, picky_digamma):
    fine = torch.full((3,), 2.0, device="xla").digamma()
    gone = torch.full((2,), 2.0, device="xla").digamma()
    weight.add_(gone.sum())
    number = test_a_failed_lowering_names_the_line_and_spares_the_operator_elsewhere
    place = f"test_failures.py:{number.__code__.co_firstlineno + 2}"
    with pytest.raises(RuntimeError, match=rf"aten\.digamma.*{place}.*no such luck"):
        torch_xla.sync()
    torch.testing.assert_close(fine.cpu(), torch.full((3,), 2.0).digamma())
    with pytest.raises(RuntimeError, match="never computed"):
        gone.tolist()
    usable(weight, [1, 1, 1])
