"""A recorded step that breaks an invariant is refused, and nothing is run."""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_xla
from xla_core.contract import events
from xla_core.execution import runtime
from xla_core.lowering.step_verifier import InvalidStepError, verify
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.entry import Entry, Operation
from xla_core.recording.step_key import Lift, Ref

_rows = itertools.count(11)


@pytest.fixture
def step():
    """Entries, outputs and donations of a real step: two inputs, a lifted number, a write in place."""
    torch_xla.sync()
    rows = next(_rows)  # a program that is known would not be missing
    x, y = torch.randn(rows, 4).to("xla"), torch.randn(rows, 4).to("xla")
    torch_xla.sync()
    seen = []
    unsubscribe = events.subscribe(events.ProgramMissing, seen.append)
    x.add_(y, alpha=1.625)
    torch._foreach_mul_([x, y], 0.125)
    torch_xla.sync()
    unsubscribe()
    missing = seen[-1]
    assert missing.aliases, "the step donates nothing"
    return list(missing.entries), list(missing.outputs), list(missing.aliases)


def changed(entry: Entry, **changes) -> Entry:
    copied = object.__new__(type(entry))
    for name in (n for kind in type(entry).__mro__ for n in getattr(kind, "__slots__", ())):
        setattr(copied, name, changes.get(name, getattr(entry, name)))
    return copied


def reading(entry: Entry, operand) -> Entry:
    return changed(entry, _operands=((operand,), {}))


def test_a_recorded_step_is_right(step):
    verify(*step)


def first_operation(entries):
    return next(i for i, e in enumerate(entries) if isinstance(e, Operation))


def test_a_value_is_read_only_after_it_was_made(step):
    entries, outputs, aliases = step
    i = first_operation(entries)
    entries[i] = reading(entries[i], Ref(entries[i].first, entries[i].metas[0]))
    with pytest.raises(InvalidStepError, match="which comes later"):
        verify(entries, outputs, aliases)


def test_a_value_is_read_as_what_it_is(step):
    entries, outputs, aliases = step
    i = first_operation(entries)
    entries[i] = reading(entries[i], Ref(0, tensor_meta((7,), torch.int8)))
    with pytest.raises(InvalidStepError, match=r"reads value 0 as int8\[7\]"):
        verify(entries, outputs, aliases)


def test_a_lifted_number_is_the_operations_own(step):
    entries, outputs, aliases = step
    i = first_operation(entries)
    entries[i] = reading(entries[i], Lift(True, 99, 0.5))
    with pytest.raises(InvalidStepError, match="lifted number 99"):
        verify(entries, outputs, aliases)


def test_values_are_numbered_in_order(step):
    entries, outputs, aliases = step
    entries[-1] = changed(entries[-1], first=entries[-1].first + 1)
    with pytest.raises(InvalidStepError, match="begins at value"):
        verify(entries, outputs, aliases)


def test_a_wanted_value_exists(step):
    entries, outputs, aliases = step
    with pytest.raises(InvalidStepError, match="no operation makes"):
        verify(entries, [*outputs, entries[-1].end], aliases)


@pytest.mark.parametrize(
    ("extra", "words"),
    [((99, 0), "no such pair"), ((0, 99), "no such pair"), (None, "in two donations")],
)
def test_donations_are_pairs_of_an_input_and_an_output(step, extra, words):
    entries, outputs, aliases = step
    with pytest.raises(InvalidStepError, match=words):
        verify(entries, outputs, [*aliases, extra or aliases[0]])


def test_memory_goes_to_a_value_of_the_same_shape(step):
    entries, outputs, aliases = step
    vid = outputs[aliases[0][1]]
    i = next(i for i, e in enumerate(entries) if e.first <= vid < e.end)
    metas = list(entries[i].metas)
    metas[vid - entries[i].first] = tensor_meta((5,), torch.float32)
    entries[i] = changed(entries[i], metas=tuple(metas))
    with pytest.raises(InvalidStepError, match="gives its memory to output"):
        verify(entries[: i + 1], [vid], [(aliases[0][0], 0)])


def test_a_broken_step_is_not_run(monkeypatch):
    x = torch.randn(5, 3).to("xla")
    torch_xla.sync()
    y = x * 2 + 1
    entry = runtime.trace_of("xla").cur
    executed = []
    unsubscribe = events.subscribe(events.ProgramExecuted, executed.append)
    monkeypatch.setattr(entry, "first", entry.first + 1)
    with pytest.raises(InvalidStepError, match="bug in xla-core"):
        torch_xla.sync()
    monkeypatch.undo()
    unsubscribe()
    assert not executed
    torch.testing.assert_close(y.cpu(), x.cpu() * 2 + 1)
