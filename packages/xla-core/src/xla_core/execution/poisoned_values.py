"""Poisoned values: tensors whose reading raises an error, as no program can compute them or they were revoked.

An operator that cannot be lowered poisons the values that depend on it, a program that cannot be compiled or
run those of its step: otherwise they would stay pending, and every later step would fail with them.
A tensor that had a value when the step began gets that one back, as if the operator had failed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xla_core.recording.entry import Entry, Input, Operation
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.storage import MSG_PLACEHOLDER, PLACEHOLDER, NoValueError, poison
from xla_core.recording.trace import Trace

if TYPE_CHECKING:
    from xla_core.operators.plan import Plan
    from xla_core.operators.run_rule import LoweringError
    from xla_core.recording.xla_tensor import XLATensor


def poison_dependents(trace: Trace, error: LoweringError) -> bool:
    """Poison the pending values that depend on the operation that ``error`` names.

    Returns whether there were any. Operations of its kind, on operands of the same shapes, are poisoned with
    it, because of operations that repeat only one is lowered. Where there is none of its kind, all operations
    of its operator are.
    """
    failed, plan = error.entry, error.plan
    if error.only_here:
        return _poison(trace, lambda e: e is failed, error)
    if failed is not None:
        kind = _kind(failed)
        if _poison(trace, lambda e: _runs(e, failed.plan) and _kind(e) == kind, error):
            return True
    return plan is not None and _poison(trace, lambda e: _runs(e, plan), error)


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


def _kind(entry: Entry) -> Any:
    """What is equal for operations on operands of the same shapes, dtypes and constants."""
    assert isinstance(entry, Operation)
    return list(map(_shaped, (entry.args, tuple(entry.kwargs.values()))))


def _shaped(a: Any) -> Any:
    """An operand without its value's number."""
    if isinstance(a, Ref):
        return a.meta
    if isinstance(a, Lift):
        return Lift
    return list(map(_shaped, a)) if isinstance(a, (list, tuple)) else repr(a)


def _poison(trace: Trace, is_the_cause: Callable[[Entry], bool], error: Exception) -> bool:
    poisoned: set[int] = set()
    for entry in trace.cur.path():
        if is_the_cause(entry) or any(ref.vid in poisoned for ref in entry.references()):
            poisoned.update(range(entry.first, entry.end))
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


def _former(trace: Trace) -> dict[int, Any]:
    """The buffers that tensors had when the step began, by their storages' ids."""
    buffers = {}
    for slot, position in enumerate(trace.input_storages):
        buffer = trace.inputs[slot]
        deleted = getattr(buffer, "is_deleted", None)  # a launch that failed may have taken it
        if buffer is not PLACEHOLDER and not (deleted is not None and deleted()):
            buffers[id(trace.touched[position])] = buffer
    return buffers


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
