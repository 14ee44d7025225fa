"""Operators that take indices, made to refuse those that are out of range.

By default they check what costs nothing to check: indices that were uploaded, of which the upload noted the
smallest and the largest. With ``XLA_CHECK_INDICES=1`` they check all indices, and record the smallest and the
largest of those that a step computes. With ``0`` they check none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.dispatch import transfers
from xla_core.dispatch.functional import find_trace
from xla_core.execution import index_checks
from xla_core.execution.index_checks import (
    MSG_CLASS,
    MSG_INDEX,
    MSG_MARGIN,
    MSG_ROW,
    MSG_TARGET,
    Range,
)
from xla_core.recording import source_location
from xla_core.recording.storage import PLACEHOLDER
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor
from xla_core.support import flags
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands
from xla_core.torch_bridge.reference_kernels import keep_whole
from xla_core.torch_bridge.torch_private import current_backward

_INT64_MAX: Final = 2**63 - 1
_MASKS: Final = (torch.bool, torch.uint8)

# dimension, its size, the index tensor, whether negative ones count from the end, an index that may be anything
_Found = tuple[int, int, torch.Tensor, bool, int | None]
_Finder = Callable[..., Iterator[_Found]]


def _size(tensor: torch.Tensor, dim: int) -> tuple[int, int]:
    """A dimension, counted from the front, and its size; a tensor without dimensions counts as one number."""
    if not tensor.dim():
        return 0, 1
    dim %= tensor.dim()  # of a wrong one, the operator complains itself
    return dim, tensor.shape[dim]


def _along(negative: bool) -> _Finder:
    def find(tensor: Operand, dim: int, index: Operand, *_rest: object) -> Iterator[_Found]:
        yield *_size(tensor, dim), index, negative, None

    return find


def _rows(table: Operand, indices: Operand, *_rest: object) -> Iterator[_Found]:
    yield *_size(table, 0), indices, False, None


def _flat(tensor: Operand, index: Operand, *_rest: object) -> Iterator[_Found]:
    yield 0, tensor.numel(), index, True, None


def _several(tensor: Operand, indices: Operand, *_rest: object) -> Iterator[_Found]:
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in _MASKS:
            dim += index.dim()  # its shape is compared where it is taken apart
        else:
            if dim < tensor.dim():
                yield dim, tensor.shape[dim], index, True, None
            dim += 1


def _classes(
    scores: Operand, target: Operand, _weight: object, _reduction: int, ignored: int = -100
) -> Iterator[_Found]:
    yield *_size(scores, 0 if scores.dim() < 2 else 1), target, False, ignored


def _hot(classes: Operand, count: int = -1) -> Iterator[_Found]:
    # without a count it is found out which is the largest
    yield classes.dim(), count if count >= 0 else _INT64_MAX, classes, False, None


def _last(scores: Operand, target: Operand, *_rest: object) -> Iterator[_Found]:
    yield max(scores.dim() - 1, 0), scores.shape[-1] if scores.dim() else 1, target, False, None


_FINDERS: Final[dict[str, tuple[str, _Finder]]] = {
    "aten::embedding": (MSG_ROW, _rows),
    "aten::_embedding_bag": (MSG_ROW, _rows),
    "aten::_embedding_bag_forward_only": (MSG_ROW, _rows),
    "aten::index_select": (MSG_ROW, _along(False)),
    "aten::index_add": (MSG_ROW, _along(False)),
    "aten::index_copy": (MSG_INDEX, _along(False)),
    "aten::index_reduce": (MSG_ROW, _along(False)),
    "aten::index_fill": (MSG_INDEX, _along(True)),
    "aten::gather": (MSG_INDEX, _along(False)),
    "aten::scatter": (MSG_INDEX, _along(False)),
    "aten::scatter_add": (MSG_INDEX, _along(False)),
    "aten::scatter_reduce": (MSG_INDEX, _along(False)),
    "aten::take": (MSG_ROW, _flat),
    "aten::put": (MSG_ROW, _flat),
    "aten::index": (MSG_INDEX, _several),
    "aten::index_put": (MSG_INDEX, _several),
    "aten::nll_loss_forward": (MSG_TARGET, _classes),
    "aten::nll_loss2d_forward": (MSG_TARGET, _classes),
    "aten::multi_margin_loss": (MSG_MARGIN, _last),
    "aten::one_hot": (MSG_CLASS, _hot),
}


def install() -> None:
    """Let what is checked arrive here, which PyTorch would take apart before."""
    keep_whole(torch.ops.aten.one_hot.default)


def checking(overload: OpOverload, handler: Handler) -> Handler:
    """``handler``, for an operator that takes indices one that checks them as ``XLA_CHECK_INDICES`` says."""
    operator = overload._schema.name
    known = _FINDERS.get(operator.removesuffix("_"))
    if known is None:
        return handler
    every = flags.CHECK_INDICES.get()
    if every is None:
        return _checking_uploaded(operator, *known, handler)
    return _checking_all(operator, *known, handler) if every else handler


def _checking_uploaded(operator: str, words: str, find: _Finder, handler: Handler) -> Handler:
    """``handler``, which first refuses uploaded indices that are out of range."""

    @functools.wraps(handler)
    def checked(args: Operands, kwargs: NamedOperands | None) -> Operand:
        for dim, size, index, negative, ignored in find(*args):
            extremes = index._s.known_extremes() if isinstance(index, XLATensor) else None
            if extremes is None:
                continue
            low = -size if negative else 0
            smallest, largest = extremes
            if (smallest < low and smallest != ignored) or (largest >= size and largest != ignored):
                wanted = Range(operator, words, dim, low, size, *source_location.user_line())
                _check_exactly(wanted, index, ignored)
        return handler(args, kwargs)

    return checked


def _check_exactly(wanted: Range, index: XLATensor, ignored: int | None) -> None:
    """Check the indices themselves: ``index`` may be a view of a few of the numbers that were uploaded."""
    trace = index._s.trace
    if _can_be_read(trace):
        values = transfers.in_buffer(index)
        if values.numel():
            wanted.check(*_extremes(wanted, values, ignored).tolist())


def _checking_all(operator: str, words: str, find: _Finder, handler: Handler) -> Handler:
    """``handler``, which also records what tells whether the indices are in range."""

    @functools.wraps(handler)
    def checked(args: Operands, kwargs: NamedOperands | None) -> Operand:
        trace = find_trace(args, kwargs)
        # the backward pass takes the indices of the forward pass
        if current_backward() == -1 and index_checks.are_wanted(trace):
            later = []
            for dim, size, index, negative, ignored in find(*args):
                if not index.numel():
                    continue
                low = -size if negative else 0
                wanted = Range(operator, words, dim, low, size, *source_location.user_line())
                known = _known_values(trace, index)
                if known is None:
                    later.append((wanted, index, ignored))
                else:
                    wanted.check(*_extremes(wanted, known, ignored).tolist())
            result = handler(args, kwargs)
            for wanted, index, ignored in later:
                extremes = _extremes(wanted, index, ignored)
                index_checks.add(extremes._s.trace, wanted, extremes)
            return result
        return handler(args, kwargs)

    return checked


def _known_values(trace: Trace, index: torch.Tensor) -> torch.Tensor | None:
    """On the CPU: the values of an index tensor that no step has to compute first; None of any other.

    Of a view of a few elements, reading would copy the whole.
    """
    if not isinstance(index, XLATensor):
        return index
    held = index._s
    if not _can_be_read(trace):
        return None
    if held.buffer is None or held.buffer is PLACEHOLDER or held.meta.numel != index.numel():
        return None
    return transfers.in_buffer(index)


def _can_be_read(trace: Trace) -> bool:
    """Whether buffers can be read as they are: over a mesh this would gather parts, a function's body has none."""
    backend = trace.backend
    return trace.body_recorder is None and not backend.shapes_only and backend.virtual_name is None


def _extremes(wanted: Range, index: torch.Tensor, ignored: int | None) -> Operand:
    """The smallest and the largest index, without those that may be anything."""
    numbers = index.detach().reshape(-1).to(torch.int64)
    if ignored is not None:
        numbers = torch.where(numbers == ignored, max(wanted.low, 0), numbers)
    return torch.stack((numbers.amin(), numbers.amax()))
