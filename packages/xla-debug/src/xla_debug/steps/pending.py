"""Looks at what a trace has recorded without changing what the step will be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from xla_core.execution import run_step, runtime
from xla_core.lowering.replay import needed_entries
from xla_core.recording.step_key import Lift, Ref, map_operands
from xla_core.recording.storage import View, chain
from xla_core.recording.trace import Entry, Trace
from xla_core.recording.xla_tensor import XLATensor

MSG_NOT_XLA: Final = "expected tensors on an xla device, got one on {device}"


@contextlib.contextmanager
def untouched(trace: Trace, views: Sequence[View] = ()) -> Iterator[None]:
    """Undo, at the end of the block, what reading values in it recorded.

    ``views`` are those that the block reads. The caller holds the trace's lock.
    """
    current, slots = trace.cur, dict(trace.input_vids)
    counts = len(trace.inputs), len(trace.touched), len(trace.input_storages)
    stale = [v for v in views if v.epoch != trace.epoch or v.version < 0]
    try:
        yield
    finally:
        for storage in trace.touched[counts[1] :]:
            storage.epoch = -1
        for view in stale:
            view.epoch = -1
        del trace.inputs[counts[0] :]
        del trace.touched[counts[1] :]
        del trace.input_storages[counts[2] :]
        trace.cur, trace.input_vids = current, slots


def alone(entries: Sequence[Entry], outputs: Sequence[int]) -> tuple[list[Entry], tuple[int, ...]]:
    """Only what ``outputs`` need, as a step of its own: inputs, numbers and values are counted anew."""
    needed = {e.first for e in needed_entries(entries, outputs)}
    read = set(outputs)
    for entry in entries:
        if entry.first in needed:
            read.update(ref.vid for ref in entry.references())
    vids: dict[int, int] = {}
    lifted: dict[bool, list[int]] = {True: [], False: []}

    def renumbered(a: Any) -> Any:
        if isinstance(a, Ref):
            return Ref(vids[a.vid], a.meta)
        if isinstance(a, Lift):
            lifted[a.is_float].append(a.position)
            return Lift(a.is_float, len(lifted[a.is_float]) - 1, a.example)
        return a

    last = Entry(None, None, None, (), 0, 0)
    for entry in entries:
        if entry.first not in (needed if entry.plan is not None else read):
            continue
        args = tuple(map_operands(renumbered, entry.args))
        kwargs = {name: map_operands(renumbered, a) for name, a in entry.kwargs.items()}
        counts = len(lifted[True]), len(lifted[False])
        last = Entry(last, entry.key, entry.plan, entry.metas, *counts, (args, kwargs))
        last.where, last.line = entry.where, entry.line
        vids.update((entry.first + i, last.first + i) for i in range(len(entry.metas)))
    return last.path(), tuple(vids[v] for v in outputs)


@contextlib.contextmanager
def graph_of(tensors: Sequence[Any]) -> Iterator[tuple[Trace, list[Entry], tuple[int, ...]]]:
    """Trace, entries and value numbers that make ``tensors`` (none: all that is wanted).

    Raises TypeError for a tensor that is not on an ``xla`` device.
    """
    for tensor in tensors:
        if not isinstance(tensor, XLATensor):
            raise TypeError(MSG_NOT_XLA.format(device=getattr(tensor, "device", type(tensor))))
    trace = tensors[0]._s.trace if tensors else runtime.trace_of(None)
    views = [view for tensor in tensors for view in chain(tensor._v)]
    pending = tensors[0]._s if tensors else None
    with trace.lock, trace.turns.showing(pending), untouched(trace, views):
        if tensors:
            outputs = tuple(trace.value_of(t) for t in tensors)
        else:
            outputs = tuple(run_step.wanted(trace)[2])
        yield trace, trace.cur.path(), outputs


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor's value is recorded and not computed yet."""
    assert isinstance(tensor, XLATensor)
    return tensor._s.trace.is_pending(tensor._s)
