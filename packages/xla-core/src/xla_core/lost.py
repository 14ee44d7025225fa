"""Tensors without a value: what no program can compute, and what was taken away on purpose.

An operator that cannot be lowered costs the values that depend on it: without this, a failed step would
stay pending, and every later one would fail with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xla_core.operands import Ref
from xla_core.storage import MSG_PLACEHOLDER, PLACEHOLDER, NoValueError, lose_value
from xla_core.trace import Entry, Trace

if TYPE_CHECKING:
    from xla_core.dispatch.plan import Plan
    from xla_core.tensor import XLATensor


def lose(trace: Trace, plan: Plan | None, error: Exception) -> bool:
    """Give up what is pending and depends on operators of ``plan``; whether there was anything."""
    return _lose(trace, lambda entry: entry.plan is not None and entry.plan is plan, error)


def lose_placeholders(trace: Trace) -> bool:
    """Give up what depends on placeholders, which become zeros; whether there was anything."""
    gone = set()
    for vid, slot in trace.input_vids.items():
        if trace.inputs[slot] is PLACEHOLDER:
            gone.add(vid)
            meta = trace.touched[trace.input_storages[slot]].meta
            trace.inputs[slot] = trace.backend.allocate(meta)
    error = NoValueError(MSG_PLACEHOLDER)
    return bool(gone) and _lose(trace, lambda e: e.plan is None and e.first in gone, error)


def _lose(trace: Trace, is_gone: Callable[[Entry], bool], error: Exception) -> bool:
    gone: set[int] = set()
    for entry in trace.cur.path():
        arguments = (*entry.args, *entry.kwargs.values())
        if is_gone(entry) or (entry.plan is not None and _uses(arguments, gone)):
            gone.update(range(entry.first, entry.end))
    epoch = trace.epoch
    found = [s for s in trace.touched if s.epoch == epoch and s.buffer is None and s.vid in gone]
    for s in found:
        lose_value(s, error)
    return bool(found)


def take_away(tensor: XLATensor, error: NoValueError) -> None:
    """Let the storage of ``tensor`` have no value; reading it or a view of it raises ``error``.

    Autograd does not see it. ``bring_back`` ends it.
    """
    storage = tensor._s
    with storage.trace.lock:
        lose_value(storage, error)
        storage.version += 1


def bring_back(tensor: XLATensor, value: XLATensor) -> None:
    """Give ``tensor``, which is no view, the value of another one; autograd does not see it."""
    trace = tensor._s.trace
    with trace.lock:
        trace.write(tensor, trace.value_of(value))


def _uses(arguments: Any, gone: set[int]) -> bool:
    return any(
        a.vid in gone if isinstance(a, Ref) else isinstance(a, (list, tuple)) and _uses(a, gone)
        for a in arguments
    )
