"""Tensors without a value: what no program can compute, and what was taken away on purpose.

An operator that cannot be lowered costs the values that depend on it, a program that cannot be compiled or
run those of its step: without this, they would stay pending, and every later step would fail with them.
A tensor that had a value when the step began has that one again, as if the operator had failed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xla_core.recording.entry import Entry, Input, Operation
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.storage import MSG_PLACEHOLDER, PLACEHOLDER, NoValueError, lose_value
from xla_core.recording.trace import Trace

if TYPE_CHECKING:
    from xla_core.operators.plan import Plan
    from xla_core.operators.run_rule import LoweringError
    from xla_core.recording.xla_tensor import XLATensor


def lose(trace: Trace, error: LoweringError) -> bool:
    """Give up the pending values that depend on the operation that ``error`` names.

    Returns whether there were any. Operations of its kind, on operands of the same shapes, are given up with
    it, because of operations that repeat only one is lowered. Where there is none of its kind, all operations
    of its operator are.
    """
    failed, plan = error.entry, error.plan
    if error.only_here:
        return _lose(trace, lambda e: e is failed, error)
    if failed is not None:
        kind = _kind(failed)
        if _lose(trace, lambda e: _runs(e, failed.plan) and _kind(e) == kind, error):
            return True
    return plan is not None and _lose(trace, lambda e: _runs(e, plan), error)


def lose_step(trace: Trace, error: Exception) -> None:
    """Give up all that is pending."""
    _lose(trace, lambda e: isinstance(e, Operation), error)


def lose_placeholders(trace: Trace) -> bool:
    """Give up what depends on placeholders, which become zeros; whether there was anything."""
    gone = {v: slot for v, slot in trace.input_vids.items() if trace.inputs[slot] is PLACEHOLDER}
    error = NoValueError(MSG_PLACEHOLDER)
    any_depends = bool(gone) and _lose(
        trace, lambda e: isinstance(e, Input) and e.first in gone, error
    )
    for slot in gone.values():
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


def _lose(trace: Trace, is_gone: Callable[[Entry], bool], error: Exception) -> bool:
    gone: set[int] = set()
    for entry in trace.cur.path():
        if is_gone(entry) or any(ref.vid in gone for ref in entry.references()):
            gone.update(range(entry.first, entry.end))
    epoch = trace.epoch
    storages = [s for s in trace.touched if s.is_pending_in(epoch) and s.vid in gone]
    former = _former(trace)
    for s in storages:
        buffer = former.get(id(s))
        if buffer is None:
            lose_value(s, error)
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


def take_away(tensor: XLATensor, error: NoValueError) -> None:
    """Let the storage of ``tensor`` have no value; reading it or a view of it raises ``error``.

    Autograd does not see it. ``bring_back`` ends it.
    """
    storage = tensor._s
    with storage.trace.lock:
        lose_value(storage, error)
        storage.touch()


def bring_back(tensor: XLATensor, value: XLATensor) -> None:
    """Give ``tensor``, which is no view, the value of another one; autograd does not see it."""
    trace = tensor._s.trace
    with trace.lock:
        trace.write(tensor, trace.value_of(value))
