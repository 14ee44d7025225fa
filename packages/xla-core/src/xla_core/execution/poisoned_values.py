"""Poisoned values: tensors whose reading raises an error, as no program can compute them or they were revoked.

An operator that cannot be lowered poisons the values that depend on it, a program that cannot be compiled or
run those of its step: otherwise they would stay pending, and every later step would fail with them.
A tensor that had a value when the step began gets that one back, as if the operator had failed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xla_core.launching.launch_queue import Awaited, DeferredRun
from xla_core.lowering import program_failures
from xla_core.operators.plan import Plan
from xla_core.operators.run_rule import LoweringError
from xla_core.recording.entry import Entry, Input, Operation
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.storage import MSG_PLACEHOLDER, PLACEHOLDER, NoValueError, poison
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor


def costs_values(error: Exception) -> bool:
    """Whether values of the step that ``error`` comes from cannot be computed, now or later."""
    return isinstance(error, LoweringError) or program_failures.costs_step(error)


def poison_dependents(trace: Trace, error: LoweringError) -> bool:
    """Poison the pending values that depend on the operation that ``error`` names.

    Returns whether there were any. Operations of its kind, on operands of the same shapes, are poisoned with
    it, because of operations that repeat only one is lowered. Where there is none of its kind, all operations
    of its operator are.
    """
    return any(_poison(trace, is_culprit, error) for is_culprit in _culprits(error))


def _culprits(error: LoweringError) -> Iterator[Callable[[Entry], bool]]:
    """What tells the operations that cannot be computed from others: the narrowest way first."""
    failed, plan = error.entry, error.plan
    if error.only_here:
        yield lambda e: e is failed
        return
    if failed is not None:
        kind = _kind(failed)
        yield lambda e: _runs(e, failed.plan) and _kind(e) == kind
    if plan is not None:
        yield lambda e: _runs(e, plan)


def depending(entries: Sequence[Entry], error: LoweringError) -> set[int]:
    """The numbers of the values in ``entries`` that depend on the operation that ``error`` names."""
    sets = (_depending(entries, is_culprit) for is_culprit in _culprits(error))
    return next(filter(None, sets), set())


def _depending(entries: Iterable[Entry], is_gone: Callable[[Entry], bool]) -> set[int]:
    gone: set[int] = set()
    for entry in entries:
        if is_gone(entry) or any(ref.vid in gone for ref in entry.references()):
            gone.update(range(entry.first, entry.end))
    return gone


def depending_on_failed(run: DeferredRun) -> dict[int, Exception]:
    """The values of a run that depend on arguments whose own runs have failed, with the errors."""
    failed = {
        vid: argument.error
        for vid, slot in run.trace.input_vids.items()
        if type(argument := run.arguments[slot]) is Awaited and argument.error is not None
    }
    lost: dict[int, Exception] = {}
    entries = run.trace.cur.path() if failed else []
    for source, error in failed.items():
        lost |= dict.fromkeys(_depending(entries, lambda e: e.first == source), error)  # noqa: B023
    return lost


def give_up(run: DeferredRun, lost: dict[int, Exception]) -> None:
    """Let those who await values of ``run`` that are ``lost`` hold what they held before, if anything."""
    for result in run.results:
        awaited = result.awaited()
        error = lost.get(result.vid)
        if awaited is None or error is None:
            continue
        former = None if result.former is None else run.arguments[result.former]
        if type(former) is Awaited:
            former = former.held
        awaited.held = None if _is_gone(former) else former
        awaited.error = error


def poison_failed(trace: Trace) -> None:
    """Give up what the pending step computes from values of runs that have failed."""
    for vid, slot in trace.input_vids.items():
        awaited = trace.inputs[slot]
        if type(awaited) is Awaited and awaited.error is not None:
            _poison(trace, lambda e: e.first == vid, awaited.error)  # noqa: B023
            meta = trace.touched[trace.input_storages[slot]].meta
            trace.inputs[slot] = trace.backend.allocate(meta)


def poison_step(trace: Trace, error: Exception) -> None:
    """Poison all that is pending: reading it raises ``error``."""
    _poison(trace, lambda e: isinstance(e, Operation), error)


def poison_placeholders(trace: Trace) -> bool:
    """Poison what depends on placeholders, which become zeros; returns whether there was anything."""
    slots = {v: slot for v, slot in trace.input_vids.items() if trace.inputs[slot] is PLACEHOLDER}
    error = NoValueError(MSG_PLACEHOLDER)
    any_depends = bool(slots) and _poison(
        trace, lambda e: isinstance(e, Input) and e.first in slots, error
    )
    for slot in slots.values():
        meta = trace.touched[trace.input_storages[slot]].meta
        trace.inputs[slot] = trace.backend.allocate(meta)
    return any_depends


def _runs(entry: Entry, plan: Plan) -> bool:
    """Whether ``entry`` is an operation of the operator that ``plan`` is about."""
    return isinstance(entry, Operation) and entry.plan is plan


def _kind(entry: Entry) -> object:
    """What is equal for operations on operands of the same shapes, dtypes and constants."""
    assert isinstance(entry, Operation)
    return list(map(_shaped, (entry.args, tuple(entry.kwargs.values()))))


def _shaped(a: Any) -> object:
    """An operand without its value's number."""
    if isinstance(a, Ref):
        return a.meta
    if isinstance(a, Lift):
        return Lift
    return list(map(_shaped, a)) if isinstance(a, (list, tuple)) else repr(a)


def _poison(trace: Trace, is_gone: Callable[[Entry], bool], error: Exception) -> bool:
    poisoned = _depending(trace.cur.path(), is_gone)
    epoch = trace.epoch
    storages = [s for s in trace.touched if s.is_pending_in(epoch) and s.vid in poisoned]
    former = _former(trace)
    for s in storages:
        buffer = former.get(id(s))
        if buffer is None:
            poison(s, error)
        else:
            s.replace(buffer)
    return bool(storages)


def _former(trace: Trace) -> dict[int, object]:
    """The buffers that tensors had when the step began, by their storages' ids."""
    buffers = {}
    for slot, position in enumerate(trace.input_storages):
        buffer = trace.inputs[slot]
        if buffer is not PLACEHOLDER and not _is_gone(buffer):
            buffers[id(trace.touched[position])] = buffer
    return buffers


def _is_gone(buffer: object) -> bool:
    """Whether there is no value: a launch that failed may have taken it."""
    deleted = getattr(buffer, "is_deleted", None)
    return type(buffer) is Awaited or (deleted is not None and deleted())


def revoke(tensor: XLATensor, error: NoValueError) -> None:
    """Let the storage of ``tensor`` have no value; reading it or a view of it raises ``error``.

    Autograd does not see it. ``restore_value`` ends it.
    """
    storage = tensor._s
    with storage.trace.lock:
        poison(storage, error)
        storage.touch()


def restore_value(tensor: XLATensor, value: XLATensor) -> None:
    """Give ``tensor``, which is no view, the value of another one; autograd does not see it."""
    trace = tensor._s.trace
    with trace.lock:
        trace.write(tensor, trace.value_of(value))
