"""Handlers of operators with small operands that PyTorch lets stay on the host, or reads.

``ctc_loss`` takes lengths as numbers or as CPU tensors; they become operands of the program, so that
batches of other lengths run the same one.
``repeat_interleave`` needs the sum of its repeats, unless its user knows it. Packed sequences have their
lengths on the host, on all of PyTorch's devices.
"""

from __future__ import annotations

from typing import Final

import torch

from xla_core.dispatch import cpu_error_parity
from xla_core.dispatch.functional import find_trace
from xla_core.dispatch.transfers import read, upload
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

aten = torch.ops.aten

# Positions of (input_lengths, target_lengths) among the arguments.
_IN_LOSS = (2, 3)
_IN_GRADIENT = (3, 4)


def _on_device(lengths: Operand, trace: Trace) -> XLATensor:
    if isinstance(lengths, XLATensor):
        return lengths
    return upload(torch.as_tensor(lengths, dtype=torch.int64), trace)


def _with_lengths(args: Operands, positions: tuple[int, int]) -> tuple[Operand, ...]:
    trace = find_trace(args)
    return tuple(_on_device(a, trace) if i in positions else a for i, a in enumerate(args))


def ctc_loss(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``_ctc_loss`` with lengths as numbers."""
    return handler_of(aten._ctc_loss.Tensor)(_with_lengths(args, _IN_LOSS), kwargs)


def ctc_loss_backward(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``_ctc_loss_backward`` with lengths as numbers."""
    handler = handler_of(aten._ctc_loss_backward.Tensor)
    return handler(_with_lengths(args, _IN_GRADIENT), kwargs)


MSG_NEGATIVE_REPEATS: Final = "repeats can not be negative"


def repeat_interleave_handler(record: Handler) -> Handler:
    """``repeat_interleave`` of repeats alone; ``record`` takes the result's length with them."""

    def repeat_interleave(args: Operands, kwargs: NamedOperands | None) -> Operand:
        repeats, named = args[0], kwargs or {}
        if named.get("output_size") is not None:
            return record(args, kwargs)
        error = cpu_error_parity.cpu_error_for(aten.repeat_interleave.Tensor, args, named)
        if error is not None:
            try:
                raise error
            finally:
                del error  # a frame that names its own exception is a cycle
        size = 0
        if repeats.numel():
            least, size = read(torch.stack([repeats.min(), repeats.sum()])).tolist()
            if least < 0:
                raise RuntimeError(MSG_NEGATIVE_REPEATS)
        return record(args, {"output_size": size})

    return repeat_interleave


def pack_padded_sequence(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``_pack_padded_sequence``: rows of the padded sequences, and how many sequences each step has, on the host.

    The host packs the rows' numbers, and raises its errors for lengths that do not fit.
    """
    padded, lengths, batch_first = args
    if not isinstance(padded, XLATensor):
        return aten._pack_padded_sequence.default(padded, read(lengths), batch_first)
    numbers = torch.arange(padded.shape[0] * padded.shape[1]).reshape(*padded.shape[:2], 1)
    on_host = read(lengths) if isinstance(lengths, XLATensor) else lengths
    rows, batch_sizes = aten._pack_padded_sequence.default(numbers, on_host, batch_first)
    chosen = upload(rows.flatten(), find_trace(args))
    return padded.flatten(0, 1).index_select(0, chosen), batch_sizes
