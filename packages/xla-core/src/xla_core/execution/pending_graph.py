"""Inspects what a trace has recorded, without changing the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from xla_core.execution import run_step, runtime
from xla_core.lowering.replay import needed_entries
from xla_core.recording.entry import Entry, Excerpt, Input, Operation, inputs_of
from xla_core.recording.storage import chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import Operand

MSG_NOT_XLA: Final = "expected tensors on an xla device, got one on {device}"


@contextlib.contextmanager
def graph_of(tensors: Sequence[Operand]) -> Iterator[tuple[Trace, list[Entry], tuple[int, ...]]]:
    """The trace, its entries, and the value numbers of ``tensors`` (if empty: of all wanted values).

    Raises TypeError for a tensor that is not on an ``xla`` device.
    """
    for tensor in tensors:
        if not isinstance(tensor, XLATensor):
            raise TypeError(MSG_NOT_XLA.format(device=getattr(tensor, "device", type(tensor))))
    trace = tensors[0]._s.trace if tensors else runtime.trace_of(None)
    views = [view for tensor in tensors for view in chain(tensor._v)]
    pending = tensors[0]._s if tensors else None
    with trace.lock, trace.turns.showing(pending), trace.undoing_reads(views):
        if tensors:
            outputs = tuple(trace.value_of(t) for t in tensors)
        else:
            outputs = tuple(run_step.wanted(trace)[2])
        yield trace, trace.cur.path(), outputs


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor's value is recorded but not computed yet."""
    assert isinstance(tensor, XLATensor)
    return tensor._s.trace.is_pending(tensor._s)


def excerpt(
    entries: Sequence[Entry], outputs: Sequence[int]
) -> tuple[list[Entry], tuple[int, ...]]:
    """The part of a step that ``outputs``, numbers of values, need, as a new step, and their numbers in it."""
    needed = needed_entries(entries, outputs)
    read = {ref.vid for entry in needed for ref in entry.references()}.union(outputs)
    copied = Excerpt()
    for entry in needed:
        if isinstance(entry, Operation):
            copied.add_operation(entry)
        elif isinstance(entry, Input) and entry.first in read:
            copied.add_input(entry.first, entry.meta)
            copied.last.relocate(entry.where, entry.line)
    return copied.last.path(), tuple(copied.vids[vid] for vid in outputs)


def read_inputs(
    trace: Trace, entries: Sequence[Entry], outputs: Sequence[int]
) -> tuple[list[int], list[Entry]]:
    """The slots of the inputs that ``outputs`` need, and the entries without the other inputs.

    Over several devices all inputs are kept, because programs there are laid out with every input of the step.
    """
    every = len(trace.backend.placement.devices) > 1
    used = set(outputs)
    for entry in needed_entries(entries, outputs):
        used.update(ref.vid for ref in entry.references())
    kept = [e for e in entries if not isinstance(e, Input) or every or e.first in used]
    return [trace.input_vids[e.first] for e in inputs_of(kept)], kept
