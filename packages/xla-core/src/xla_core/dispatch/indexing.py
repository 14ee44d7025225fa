"""Indexing with masks and with index tensors that are still on the host.

The shape of ``x[mask]`` depends on the mask's values: the number of elements under it alone is
fetched, and where they are stays on the device. Assigning one number under a mask needs not
even that.
"""

from __future__ import annotations

import torch

from xla_core.dispatch.functional import find_trace
from xla_core.dispatch.transfers import upload
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

_MASKS = (torch.bool, torch.uint8)
_NONZERO = torch.ops.aten.nonzero.default
_MASKED_SELECT = torch.ops.aten.masked_select.default


def _has_mask(indices: Operand) -> bool:
    return any(i is not None and i.dtype in _MASKS for i in indices)


def _device_indices(indices: Operand, trace: Trace) -> list[Operand]:
    """Index tensors on the device, each mask replaced by one index tensor per dimension."""
    expanded: list[Operand] = []
    for index in indices:
        if index is None:
            expanded.append(None)
        elif index.dtype in _MASKS:
            expanded.extend(_positions(index, trace))
        elif isinstance(index, XLATensor):
            expanded.append(index)
        else:
            expanded.append(upload(index, trace))
    return expanded


def _positions(mask: torch.Tensor, trace: Trace) -> list[torch.Tensor]:
    """Where ``mask`` holds, as one index tensor per dimension."""
    if isinstance(mask, XLATensor):
        return list(handler_of(_NONZERO)((mask,), None).unbind(1))
    return [upload(i.contiguous(), trace) for i in mask.nonzero().unbind(1)]


def _is_whole_mask(source: torch.Tensor, indices: Operand) -> bool:
    """Whether ``source`` is indexed by one mask of its own shape on the device."""
    if len(indices) != 1:
        return False
    mask = indices[0]
    return type(mask) is XLATensor and mask.dtype == torch.bool and mask.shape == source.shape


def _check_masks(shape: torch.Size, indices: Operand) -> None:
    dimension = 0
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            for offset, size in enumerate(index.shape):
                if dimension + offset >= len(shape) or size != shape[dimension + offset]:
                    raise IndexError(
                        f"The shape of the mask {list(index.shape)} at index {offset} does not match the "
                        f"shape of the indexed tensor {list(shape)} at index {dimension + offset}"
                    )
            dimension += index.dim()
        else:
            dimension += 1


def index_handler(record: Handler) -> Handler:
    """``index.Tensor``; ``record`` takes integer index tensors on the device."""

    def index(args: Operands, kwargs: NamedOperands | None) -> Operand:
        source, indices = args[0], args[1]
        if not all(type(i) is XLATensor and i.dtype not in _MASKS for i in indices):
            trace = find_trace(args)
            _check_masks(source.shape, indices)
            if not isinstance(source, XLATensor):
                source = upload(source, trace)
            if _is_whole_mask(source, indices):
                return handler_of(_MASKED_SELECT)((source, indices[0]), None)
            args = (source, _device_indices(indices, trace))
        return record(args, kwargs)

    return index


def index_put_handler(record: Handler, in_place: bool) -> Handler:
    """``index_put`` and ``index_put_``; ``record`` takes integer index tensors on the device."""

    def index_put(args: Operands, kwargs: NamedOperands | None) -> Operand:
        target, indices, values = args[:3]
        trace = find_trace(args)
        accumulate = args[3] if len(args) > 3 else (kwargs or {}).get("accumulate", False)
        if not isinstance(values, XLATensor) and values.dim() == 0:
            values = upload(values.to(target.dtype), trace)
        if _has_mask(indices):
            _check_masks(target.shape, indices)
            if len(indices) == 1 and values.numel() == 1 and not accumulate:
                return _masked_fill(target, indices[0], values, trace, in_place)
        if not all(type(i) is XLATensor and i.dtype not in _MASKS for i in indices):
            indices = _device_indices(indices, trace)
        return record((target, indices, values, accumulate), None)

    return index_put


def _masked_fill(
    target: Operand, mask: Operand, values: Operand, trace: Trace, in_place: bool
) -> Operand:
    mask = mask if isinstance(mask, XLATensor) else upload(mask, trace)
    mask = mask.to(torch.bool).reshape(mask.shape + (1,) * (target.dim() - mask.dim()))
    masked_fill = torch.ops.aten.masked_fill_ if in_place else torch.ops.aten.masked_fill
    return handler_of(masked_fill.Tensor)((target, mask, values.reshape(())), None)
