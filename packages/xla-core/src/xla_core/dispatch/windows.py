"""``as_strided`` and related operators, whose offsets count from the storage's start, not from the view's.

Without an offset, strides count as the tensor reports its own (see ``strided_gradients``).

A tensor that shows a whole storage is what the rules know: their base is contiguous. A view is looked at anew
from its storage, or from what the CPU would have copied on the way (a reshaped transpose).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.dispatch import transfers, views
from xla_core.dispatch.functional import functional_handler
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.operators.lowering_registry import Rule, ViewRule, find_rule, find_view
from xla_core.operators.schema import signature
from xla_core.recording.geometry import geometry
from xla_core.recording.storage import chain
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands
from xla_core.torch_bridge.strided_gradients import SHIFT, Place, in_storage, register

aten = torch.ops.aten

AS_STRIDED: Final = aten.as_strided.default
_COPY: Final = aten.as_strided_copy.default
_SCATTER: Final = aten.as_strided_scatter.default

# Autograd repeats the views of a base on others like it, where an offset counted from here is out of bounds.
_NOWHERE: Final = -(1 << 40)

# PyTorch's own words
MSG_SRC_SIZE: Final = (
    "expected src to have a size equal to the slice of self. src size = {src}, slice size = {slice}"
)
MSG_SCATTER_GRADIENT: Final = (
    "as_strided_scatter has a gradient for contiguous tensors only, as on the CPU; "
    "call .contiguous() on the tensor before"
)
MSG_DETACHED_PART: Final = (
    "a write in place into as_strided() of a tensor that was detached from a part of its storage has no "
    "gradient on an xla device; call .clone() on the detached tensor before as_strided()"
)


def as_strided_handler() -> Handler:
    """The handler of ``as_strided``."""
    whole = views.view_handler(_plan(AS_STRIDED, find_view(AS_STRIDED)), signature(AS_STRIDED))

    def as_strided(args: Operands, kwargs: NamedOperands | None) -> Operand:
        tensor, size, stride, offset = _arguments(AS_STRIDED, args, kwargs)
        if tensor._v is None:
            _check_repeated(offset)
            return whole((tensor, size, stride, offset), None)
        place = geometry(tensor._s, tensor._v)
        base = _base(tensor, place.skipped)
        if offset is None:  # in inference mode; else autograd's kernel has looked at the strides
            stride, offset = in_storage(tensor.shape, place.stride, stride), place.offset
        else:
            offset += tensor.__dict__.get(SHIFT, 0)
        _check_repeated(offset)
        seen = whole((base, size, stride, offset), None)
        if place.conjugate:
            seen = handler_of(aten._conj.default)((seen,), None)
        return handler_of(aten._neg_view.default)((seen,), None) if place.negative else seen

    return as_strided


def _check_repeated(offset: int | None) -> None:
    if offset is not None and offset >= -_NOWHERE:
        raise RuntimeError(MSG_DETACHED_PART)


def as_strided_copy_handler() -> Handler:
    """The handler of ``as_strided_copy``: the value of a window, in a storage of its own."""
    whole = functional_handler(_plan(_COPY, find_rule(_COPY)), "tensor")

    def as_strided_copy(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if args[0]._v is None:
            return whole(args, kwargs)
        window = handler_of(AS_STRIDED)(args, kwargs)
        trace = window._s.trace
        with trace.lock:
            return trace.new_tensor(window._v.meta, trace.value_of(window))

    return as_strided_copy


def as_strided_scatter_handler() -> Handler:
    """The handler of ``as_strided_scatter``: what the tensor shows after a write to a copy of its storage."""
    whole = functional_handler(_plan(_SCATTER, find_rule(_SCATTER)), "tensor")

    def as_strided_scatter(args: Operands, kwargs: NamedOperands | None) -> Operand:
        tensor, src, *window = _arguments(_SCATTER, args, kwargs)
        if tensor._v is None:
            return whole(args, kwargs)
        if torch.is_grad_enabled() and tensor.requires_grad and not is_dense(tensor):
            raise RuntimeError(MSG_SCATTER_GRADIENT)
        copied = _with_its_storage(tensor)
        target = handler_of(AS_STRIDED)((copied, *window), None)
        if target.shape != src.shape:
            raise RuntimeError(MSG_SRC_SIZE.format(src=list(src.shape), slice=list(target.shape)))
        transfers.copy_((target, src), None)
        return copied

    return as_strided_scatter


def is_dense(tensor: XLATensor) -> bool:
    """Whether a CPU tensor seen through the same views would be contiguous."""
    place = geometry(tensor._s, tensor._v)
    return views.with_strides(tensor, place.stride, place.offset).is_contiguous()


def _plan(overload: OpOverload, rule: Rule | ViewRule | None) -> OperatorPlan:
    return OperatorPlan(overload, rule)


def _arguments(
    overload: OpOverload, args: Operands, kwargs: NamedOperands | None
) -> Sequence[Operand]:
    names = tuple(a.name for a in overload._schema.arguments)
    full = [*args, *[a.default_value for a in overload._schema.arguments[len(args) :]]]
    for name, value in (kwargs or {}).items():
        full[names.index(name)] = value
    return full


def _base(tensor: XLATensor, skipped: int) -> XLATensor:
    """The contiguous elements that the views after the first ``skipped`` look at, in the tensor's dtype."""
    under = chain(tensor._v)[skipped - 1] if skipped else None
    base = views.showing(tensor, under)
    if base.dtype == tensor.dtype:
        return base
    flat = handler_of(aten.view.default)((base, [-1]), None)
    together = -(-tensor.dtype.itemsize // base.dtype.itemsize)
    fitting = flat.shape[0] // together * together
    if fitting != flat.shape[0]:
        flat = handler_of(aten.slice.Tensor)((flat, 0, 0, fitting, 1), None)
    return handler_of(aten.view.dtype)((flat, tensor.dtype), None)


def _with_its_storage(tensor: XLATensor) -> XLATensor:
    """A copy that looks at a copy of the storage as ``tensor`` looks at its own, if no element repeats."""
    place = geometry(tensor._s, tensor._v)
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, place.stride, strict=True)):
        return handler_of(aten.clone.default)((tensor,), None)
    seen = chain(tensor._v)
    under = views.showing(tensor, seen[place.skipped - 1] if place.skipped else None)
    trace = tensor._s.trace
    with trace.lock:
        meta = under._v.meta if under._v is not None else under._s.meta
        copied = trace.new_tensor(meta, trace.value_of(under))
    for view in seen[place.skipped :]:
        copied = handler_of(view.plan.overload)((copied, *view.args), None)
    return copied


def _place_of(tensor: torch.Tensor) -> Place | None:
    """Where a view lies, for the gradient of ``as_strided``; None where that is what the tensor reports.

    Autograd also repeats a view on a tensor like its base, once it was written to. Then a base that was
    detached from a part of its storage is one of its own, and offsets mean something else: that is refused.
    """
    if not isinstance(tensor, XLATensor) or tensor._v is None:
        return None
    place = geometry(tensor._s, tensor._v)
    shift = 0 if _begins_with_its_base(tensor) else _NOWHERE
    true = views.with_strides(tensor, place.stride, place.offset - shift)
    return None if true.is_contiguous() and not true.storage_offset() else (true, shift)


def _begins_with_its_base(tensor: XLATensor) -> bool:
    """Whether autograd's base of a tensor shows its storage from the first element on, one after the other."""
    base = tensor._base if tensor._is_view() else tensor
    if not isinstance(base, XLATensor) or base._v is None:
        return True
    return is_dense(base) and geometry(base._s, base._v).offset == 0


def install() -> None:
    """Tell autograd where views lie before it writes down a gradient of ``as_strided``; once."""
    register(_place_of)
