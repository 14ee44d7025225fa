"""Tensors without a value: what no program can compute, and what was taken away on purpose.

An operator that cannot be lowered costs the values that depend on it: without this, a failed step would
stay pending, and every later one would fail with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xla_core.storage import PLACEHOLDER, LostValue, NoValueError
from xla_core.trace import Entry, Ref, Trace

if TYPE_CHECKING:
    from xla_core.dispatch.plan import Plan
    from xla_core.tensor import XLATensor

_NEVER = -2  # the epoch of a storage whose value is lost; no trace has it


def lose(trace: Trace, plan: Plan | None, error: Exception) -> bool:
    """Give up what is pending and depends on operators of ``plan``; whether there was anything."""
    return _lose(trace, lambda entry: entry.plan is not None and entry.plan is plan, error)


def lose_placeholders(trace: Trace, error: Exception) -> bool:
    """Give up what depends on placeholders, and give those zeros; whether there were any."""
    gone = set()
    for vid, slot in trace.input_vids.items():
        if trace.inputs[slot] is PLACEHOLDER:
            gone.add(vid)
            meta = trace.touched[trace.input_storages[slot]].meta
            trace.inputs[slot] = trace.backend.allocate(meta)
    if gone:
        _lose(trace, lambda entry: entry.plan is None and entry.first in gone, error)
    return bool(gone)


def _lose(trace: Trace, is_gone: Callable[[Entry], bool], error: Exception) -> bool:
    gone: set[int] = set()
    for entry in trace.cur.path():
        arguments = (*entry.args, *entry.kwargs.values())
        if is_gone(entry) or (entry.plan is not None and _uses(arguments, gone)):
            gone.update(range(entry.first, entry.end))
    epoch = trace.epoch
    found = [s for s in trace.touched if s.epoch == epoch and s.buffer is None and s.vid in gone]
    for s in found:
        s.epoch = _NEVER
        s.vid = LostValue(error)
    return bool(found)


def take_away(tensor: XLATensor, error: NoValueError) -> None:
    """Let the storage of ``tensor`` have no value; reading it or a view of it raises ``error``.

    Autograd does not see it. ``bring_back`` ends it.
    """
    storage = tensor._s
    with storage.trace.lock:
        storage.epoch = _NEVER
        storage.vid = LostValue(error)
        storage.buffer = None
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
