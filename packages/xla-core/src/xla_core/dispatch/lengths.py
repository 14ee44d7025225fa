"""Handlers of operators with small operands that PyTorch lets stay on the host.

``ctc_loss`` takes lengths as numbers or as CPU tensors; they become operands of the program, so that
batches of other lengths run the same one. ``_linalg_check_errors`` looks at a result of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_core.dispatch.functional import find_trace
from xla_core.dispatch.transfers import upload
from xla_core.tensor import XLATensor, handler_of
from xla_core.trace import Trace

aten = torch.ops.aten

# Positions of (input_lengths, target_lengths) among the arguments.
_IN_LOSS = (2, 3)
_IN_GRADIENT = (3, 4)


def _on_device(lengths: Any, trace: Trace) -> XLATensor:
    if isinstance(lengths, XLATensor):
        return lengths
    return upload(torch.as_tensor(lengths, dtype=torch.int64), trace)


def _with_lengths(args: tuple[Any, ...], positions: tuple[int, int]) -> tuple[Any, ...]:
    trace = find_trace(args)
    return tuple(_on_device(a, trace) if i in positions else a for i, a in enumerate(args))


def ctc_loss(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """``_ctc_loss`` with lengths as numbers."""
    return handler_of(aten._ctc_loss.Tensor)(_with_lengths(args, _IN_LOSS), kwargs)


def ctc_loss_backward(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """``_ctc_loss_backward`` with lengths as numbers."""
    handler = handler_of(aten._ctc_loss_backward.Tensor)
    return handler(_with_lengths(args, _IN_GRADIENT), kwargs)


def masked_select(args: tuple[Any, ...], _kwargs: dict[str, Any] | None) -> Any:
    """``masked_select``: indexing with a mask, of which only the mask is fetched."""
    source, mask = torch.broadcast_tensors(*args)
    return source[mask]
