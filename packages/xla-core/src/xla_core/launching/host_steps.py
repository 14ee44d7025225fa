"""Steps that are not worth a program: a few operations on a few integers, whose result is read immediately.

``(mask == 0).any()`` would need a program for each length of the mask, and compiling one takes a thousand times as
long as PyTorch takes on the CPU. PyTorch therefore computes such steps from the device's values: all of them if the
user says that sizes vary (``XLA_VARYING_SHAPES=1``), otherwise those that answer a question with a single number
while gradients are off, as text generation does. Results of integers and truth values are the same there. A step
that repeats is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.lowering.replay import needed_entries
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.trace import Trace
from xla_core.support import caches, counters, flags
from xla_core.torch_bridge import dtypes

ON_HOST: Final = "VaryingShapesOnHost"
"""The counter of steps that PyTorch computed on the CPU, without a program."""

_MOST_OPERATIONS: Final = 16
_MOST_ELEMENTS: Final = 4096
# A step is computed on the CPU this many times before it is compiled: if the user says that sizes vary, and if not.
_MOST_TIMES: Final = 4
_MOST_TIMES_UNASKED: Final = 1
_EXACT: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)

_times: caches.Bounded[int, int] = caches.Bounded("steps on the host", 1024)


def run(trace: Trace, outputs: Sequence[int]) -> dict[int, Buffer] | None:
    """The buffers of the values ``outputs`` of the pending step; None if the step should have a program."""
    asked = flags.VARYING_SHAPES.get()
    if asked is False or trace.cur.depth > 2 * _MOST_OPERATIONS:
        return None
    if asked is None and torch.is_grad_enabled():
        return None
    backend = trace.backend
    if (
        not backend.may_defer
        or len(backend.replicas) > 1
        or trace.eager_flush
        or trace.body_recorder
    ):
        return None
    if events.listening(events.ProgramExecuted):
        return None
    entries = needed_entries(trace.cur.path(), tuple(outputs))
    operations = operations_of(entries)
    if len(operations) > _MOST_OPERATIONS or not all(map(_is_small, entries)):
        return None
    if asked is None and not _asks(entries, outputs):
        return None
    times = _times.get(id(trace.cur), 0)
    if times >= (_MOST_TIMES if asked else _MOST_TIMES_UNASKED) or not all(
        map(_is_plain, operations)
    ):
        return None
    _times.keep(id(trace.cur), times + 1)
    try:
        values = _computed(trace, entries)
    except (RuntimeError, IndexError, NotImplementedError):
        return None  # the device may compute what the CPU refuses
    if values is None:
        return None
    counters.increment(ON_HOST)
    return {vid: backend.put(dtypes.to_numpy(values[vid].contiguous())) for vid in outputs}


def _is_small(entry: Entry) -> bool:
    return all(
        meta is None or (meta.dtype in _EXACT and meta.numel <= _MOST_ELEMENTS)
        for meta in entry.metas
    )


def _asks(entries: Sequence[Entry], outputs: Sequence[int]) -> bool:
    """Whether a result is a single number computed from several, such as whether any of them is zero."""
    metas = {
        vid: meta
        for entry in entries
        for vid, meta in enumerate(entry.metas, entry.first)
        if meta is not None
    }
    return any(metas[vid].numel == 1 for vid in outputs) and any(
        meta.numel > 1 for meta in metas.values()
    )


def _is_plain(operation: Operation) -> bool:
    """Whether PyTorch's operator of that name computes the operation."""
    plan = operation.plan
    return plan.name == str(plan.overload) and plan.overload.namespace == "aten" and not plan.random


def _computed(trace: Trace, entries: Sequence[Entry]) -> dict[int, torch.Tensor] | None:
    """The values of ``entries`` on the CPU; None if the shape or dtype of one is not the recorded one."""
    values: dict[int, torch.Tensor] = {}
    for entry in entries:
        if isinstance(entry, Operation):
            args = [_operand(a, trace, values) for a in entry.args]
            named = {name: _operand(a, trace, values) for name, a in entry.kwargs.items()}
            overload = entry.plan.overload
            if overload._schema.is_mutable:  # in the step, the write makes a new value
                args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            result = overload(*args, **named)
            results = list(result) if isinstance(result, (list, tuple)) else [result]
        else:
            buffer = trace.inputs[trace.input_vids[entry.first]]
            meta = entry.metas[0]
            assert meta is not None
            results = [dtypes.from_numpy(trace.backend.get(buffer), meta.dtype)]
        if not all(map(_is_as_promised, results, entry.metas)):
            return None
        values.update(zip(range(entry.first, entry.end), results, strict=True))
    return values


def _operand(operand: object, trace: Trace, values: dict[int, torch.Tensor]) -> object:
    if isinstance(operand, Ref):
        return values[operand.vid]
    if isinstance(operand, Lift):
        number = (trace.floats if operand.is_float else trace.ints)[operand.position]
        example = operand.example
        return (
            torch.tensor(number, dtype=example.dtype) if isinstance(example, TensorMeta) else number
        )
    if isinstance(operand, (list, tuple)):
        return [_operand(item, trace, values) for item in operand]
    return operand


def _is_as_promised(result: object, meta: TensorMeta | None) -> bool:
    if meta is None:
        return True
    return (
        isinstance(result, torch.Tensor)
        and tuple(result.shape) == meta.shape
        and result.dtype == meta.dtype
    )
