"""Poisoned values: reading them raises an error, because no program can compute them or they were revoked.

An operator that cannot be lowered poisons the values that depend on it. A program that cannot be compiled or
run poisons those of its step. Otherwise they would remain pending, and every later step would fail as well.
A tensor that had a value when the step began returns to it, as if the operator had failed immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """Whether ``error`` means that values of its step can be computed neither now nor later."""
    return isinstance(error, LoweringError) or program_failures.costs_step(error)


def poison_dependents(trace: Trace, error: LoweringError) -> bool:
    """Poison the pending values that depend on the operation that ``error`` names.

    Returns whether there were any. Operations of the same kind (on operands of the same shapes) count as well,
    because only one of several repeated operations is lowered. If there is none, all operations of its operator
    count.
    """
    return any(_poison(trace, is_culprit, error) for is_culprit in _culprits(error))


def _culprits(error: LoweringError) -> Iterator[Callable[[Entry], bool]]:
    """Predicates for the operations that cannot be computed, the narrowest one first."""
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


def _depending(entries: Iterable[Entry], is_lost: Callable[[Entry], bool]) -> set[int]:
    lost: set[int] = set()
    for entry in entries:
        if is_lost(entry) or any(ref.vid in lost for ref in entry.references()):
            lost.update(range(entry.first, entry.end))
    return lost


def depending_on_failed(run: DeferredRun) -> dict[int, Exception]:
    """The values of a run that depend on results of failed runs, with the errors of those."""
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
    """Give each lost awaited value of ``run`` its error, and its tensor's former buffer if there is one."""
    for result in run.results:
        awaited = result.awaited()
        error = lost.get(result.vid)
        if awaited is None or error is None:
            continue
        former = None if result.former is None else run.arguments[result.former]
        if type(former) is Awaited:
            former = former.held
        awaited.held = None if _has_no_value(former) else former
        awaited.error = error


def poison_failed(trace: Trace) -> None:
    """Poison what the pending step computes from values of failed runs."""
    for vid, slot in trace.input_vids.items():
        awaited = trace.inputs[slot]
        if type(awaited) is Awaited and awaited.error is not None:
            _poison(trace, lambda e: e.first == vid, awaited.error)  # noqa: B023
            meta = trace.touched[trace.input_storages[slot]].meta
            trace.inputs[slot] = trace.backend.allocate(meta)


def poison_step(trace: Trace, error: Exception) -> None:
    """Poison all pending values: reading one raises ``error``."""
    _poison(trace, lambda e: isinstance(e, Operation), error)


def poison_placeholders(trace: Trace) -> bool:
    """Poison what depends on placeholders, and replace these by zeros; returns whether anything depends on them."""
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
    """Whether ``entry`` is a call of the operator of ``plan``."""
    return isinstance(entry, Operation) and entry.plan is plan


def _kind(entry: Entry) -> object:
    """A key that is equal for operations on operands of the same shapes, dtypes and constants."""
    assert isinstance(entry, Operation)
    return list(map(_shaped, (entry.args, tuple(entry.kwargs.values()))))


def _shaped(a: object) -> object:
    """An operand without the number of its value."""
    if isinstance(a, Ref):
        return a.meta
    if isinstance(a, Lift):
        return Lift
    return list(map(_shaped, a)) if isinstance(a, (list, tuple)) else repr(a)


def _poison(trace: Trace, is_lost: Callable[[Entry], bool], error: Exception) -> bool:
    poisoned = _depending(trace.cur.path(), is_lost)
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
        if buffer is not PLACEHOLDER and not _has_no_value(buffer):
            buffers[id(trace.touched[position])] = buffer
    return buffers


def _has_no_value(buffer: object) -> bool:
    """Whether a buffer has no value, because it is still awaited or a failed launch has consumed it."""
    deleted = getattr(buffer, "is_deleted", None)
    return type(buffer) is Awaited or (deleted is not None and deleted())


def revoke(tensor: XLATensor, error: NoValueError) -> None:
    """Take the value of ``tensor`` away: reading it or a view of it raises ``error``.

    Autograd does not notice. ``restore_value`` gives it a value again.
    """
    storage = tensor._s
    with storage.trace.lock:
        poison(storage, error)
        storage.touch()


def restore_value(tensor: XLATensor, value: XLATensor) -> None:
    """Give ``tensor``, which must not be a view, the value of another tensor; autograd does not notice."""
    trace = tensor._s.trace
    with trace.lock:
        trace.write(tensor, trace.value_of(value))
