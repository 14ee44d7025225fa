"""Handlers of operators that write to their arguments: in-place, ``out=``, optimizer kernels."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Final

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from xla_core.dispatch import cpu_error_parity, layouts, views
from xla_core.dispatch.functional import find_trace, functional_handler, seeded, wrap_results
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.operators import error_messages
from xla_core.operators.lowering_registry import find_rule
from xla_core.operators.plan import Plan
from xla_core.operators.schema import Signature
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording import source_location
from xla_core.recording.geometry import geometry
from xla_core.recording.storage import chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

MSG_OUT_DTYPE: Final = "result type {result} can't be cast to the desired output type {out}"
MSG_OUT_GRADIENT: Final = (
    "{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
    "arguments requires grad."
)
MSG_OUT_RESIZED: Final = (
    "An output with one or more elements was resized since it had shape {had}, which does not match the "
    "required output shape {needed}. This behavior is deprecated, and in a future PyTorch release outputs "
    "will not be resized unless they have zero elements. You can explicitly reuse an out tensor t by "
    "resizing it, inplace, to zero elements with t.resize_(0)."
)
# PyTorch's own words
MSG_INFERENCE: Final = (
    "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a "
    "normal tensor before doing inplace update.See https://github.com/pytorch/rfcs/pull/17 for more details."
)
_is_inference: Final = torch.Tensor.is_inference
_AS_STRIDED: Final = torch.ops.aten.as_strided.default
# The out= of these must have the result's dtype: it does not determine the dtype of the computation.
_STRICT_DTYPES: Final = (
    torch.ops.aten.softmax.int_out,
    torch.ops.aten.log_softmax.int_out,
    torch.ops.aten.linalg_vector_norm.out,
)
# These refuse an out= that is also an operand.
_NOT_IN_PLACE: Final = (
    torch.ops.aten.cat.default,
    torch.ops.aten.gather.default,
    torch.ops.aten.index_select.default,
    torch.ops.aten.take_along_dim.default,
    torch.ops.aten.cross.default,
    torch.ops.aten.linalg_cross.default,
)


def mutating_handler(plan: Plan, signature: Signature) -> Handler:
    """A handler that records the pure form, and assigns its results to the written arguments."""
    new_results = signature.new_results
    written = signature.written
    names = signature.names
    lists = signature.writes_lists

    def mutate(args: Operands, kwargs: NamedOperands | None) -> Operand:
        first = args[0]
        trace = first._s.trace if type(first) is XLATensor else find_trace(args, kwargs)
        with trace.bare:
            entry = trace.record(plan, args, kwargs)
            targets = _targets(args, kwargs, written, names)
            if lists and not views.is_inference_mode():
                _check_inference(targets)
            trace.write_each(targets, entry.first + new_results)
            if lists:
                increment_version(targets)
            if not new_results:
                return first if signature.returns == "tensor" else None
            results = wrap_results(trace, entry, "tuple")[:new_results]
            return results[0] if signature.returns == "tensor" else results

    def mutate_first(args: Operands, kwargs: NamedOperands | None) -> Operand:
        target = args[0]
        if type(target) is not XLATensor and not isinstance(target, XLATensor):
            raise error_messages.not_an_xla_tensor(
                target, plan.name, find_trace(args, kwargs).device
            )
        trace = target._s.trace
        with trace.bare:
            entry = trace.record(plan, args, kwargs)
            if target._v is None:
                trace.assign(target._s, entry.first)
            else:
                trace.write(target, entry.first)
        return target

    simple = written == (0,) and new_results == 0 and signature.returns == "tensor"
    handler = mutate_first if simple else mutate
    return seeded(handler, plan) if plan.random else handler


def _targets(
    args: Operands,
    kwargs: NamedOperands | None,
    written: tuple[int, ...],
    names: tuple[str, ...],
) -> list[XLATensor]:
    targets: list[XLATensor] = []
    for position in written:
        if position < len(args):
            target = args[position]
        else:
            target = kwargs.get(names[position]) if kwargs else None
        if isinstance(target, (list, tuple)):
            targets.extend(target)
        elif target is not None:
            targets.append(target)
    return targets


def _check_inference(targets: list[XLATensor]) -> None:
    """Raise, for lists of tensors, the error that autograd raises for single ones, as on the CPU."""
    if any(map(_is_inference, targets)):
        raise RuntimeError(MSG_INFERENCE)


def out_handler(overload: OpOverload, pure: OpOverload, signature: Signature) -> Handler:
    """A handler for ``out=`` that stores the results of ``pure``, the form without it, in the given tensors."""
    names = [a.name for a in overload._schema.arguments if a.is_out]
    given = {a.name for a in overload._schema.arguments}
    # A factory's out= determines dtype and device; a reduction's determines the dtype of the computation.
    factory = {a.name for a in pure._schema.arguments} & {"dtype", "device"}
    if overload in _STRICT_DTYPES:
        factory -= given
    composite = (
        overload._can_decompose()
    )  # for other operators, autograd has already refused gradients
    where_dtype = signature.names.index("dtype") if "dtype" in signature.names else None

    def into(args: Operands, kwargs: NamedOperands | None) -> Operand:
        named = dict(kwargs or {})
        outs = _flat_outs(named.pop(name) for name in names)
        if composite:
            _check_no_gradients(overload, (*args, *named.values(), *outs))
        if "dtype" in factory and args and outs[0].dtype != getattr(args[0], "dtype", None):
            _check_out(overload, args, kwargs or {}, cpu_error_parity.dtype_error)
        for name in factory - named.keys():
            if name != "dtype" or where_dtype is None or where_dtype >= len(args):
                named[name] = getattr(outs[0], name)
        try:
            results = handler_of(pure)(args, named)
        except layouts.LayoutError:
            raise
        except NotImplementedError:  # the CPU checks out= before it looks for a kernel
            _check_out(overload, args, kwargs or {})
            raise
        results = results if isinstance(results, (tuple, list)) else (results,)
        if len(outs) != len(results) or len(outs) != len(set(map(id, outs))):
            _check_out(overload, args, kwargs or {})  # torch 2.15: aminmax() refuses one for both
        for out, result in zip(outs, results, strict=True):
            unlike = pure in _NOT_IN_PLACE or out.shape != result.shape
            if out.dtype != result.dtype or (unlike and _is_among(out, args)):
                _check_out(overload, args, kwargs or {})
                if not cpu_error_parity.are_small((*args, out), kwargs or {}):
                    _check_cast(out, result)
            _store(out, result, str(pure))
        if signature.returns == "none":
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    return into


def _flat_outs(outs: Iterable[Operand]) -> list[torch.Tensor]:
    """The tensors to write to: each ``out=`` argument is one, or a list of them."""
    return [t for out in outs for t in (out if isinstance(out, (list, tuple)) else (out,))]


def _check_no_gradients(overload: OpOverload, operands: Iterable[Operand]) -> None:
    """Raise autograd's error if an operand requires a gradient."""
    if torch.is_grad_enabled() and any(
        isinstance(x, XLATensor) and x.requires_grad for x in operands
    ):
        raise RuntimeError(MSG_OUT_GRADIENT.format(name=overload._schema.name.split("::")[1]))


def _is_among(out: Operand, args: Iterable[Operand]) -> bool:
    return any(
        out is one or (isinstance(one, (list, tuple)) and _is_among(out, one)) for one in args
    )


def _check_out(
    overload: OpOverload,
    args: Operands,
    kwargs: NamedOperands,
    error_for: Callable[
        [OpOverload, Operands, NamedOperands], Exception | None
    ] = cpu_error_parity.cpu_error_for,
) -> None:
    """Raise the CPU's error for an unsuitable ``out=``, such as one of another dtype, if it raises one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about shapes: _store() warns itself
        error = error_for(overload, args, kwargs)
    if error is not None:
        try:
            raise error
        finally:
            del error  # a frame that names its own exception is a cycle


def _store(out: Operand, result: XLATensor, name: str) -> None:
    if not isinstance(out, XLATensor):
        raise error_messages.not_an_xla_tensor(out, name, result.device)
    if out.shape != result.shape:
        if out.numel():
            had, needed = list(out.shape), list(result.shape)
            text = MSG_OUT_RESIZED.format(had=had, needed=needed)
            warnings.warn_explicit(text, UserWarning, *source_location.user_line())
        _write_to_former_place(out, result)
        resize(out, tuple(result.shape))
    handler_of(torch.ops.aten.copy_.default)((out, result), None)


def _write_to_former_place(out: XLATensor, result: XLATensor) -> None:
    """Write what fits to the storage of an ``out=`` that is about to leave it: others may show it, too."""
    start, room = _room(out) if out._v is not None else (0, out._s.meta.numel)
    if start < room < start + result.numel():
        there = handler_of(_AS_STRIDED)((out, (room - start,), (1,), start), None)
        there.copy_(result.detach().reshape(-1)[: room - start])


def normal_into(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``normal(mean, std, out=)`` of a tensor ``mean``: drawn in the shape of ``out``, as on the CPU."""
    mean, std = (*args, 1.0)[:2]
    named = {"std": std, **(kwargs or {})}
    out = named["out"]
    out.normal_(0, named["std"], generator=named.get("generator"))
    _store(out, torch.add(mean, out), "aten.normal.Tensor_float_out")
    return out


def _check_cast(out: torch.Tensor, result: XLATensor) -> None:
    """Raise the error that nearly all operators raise on the CPU, for operands too large to try there."""
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(
            MSG_OUT_DTYPE.format(result=_scalar_name(result.dtype), out=_scalar_name(out.dtype))
        )


def _scalar_name(dtype: torch.dtype) -> str:
    """The name of a dtype in PyTorch's C++ messages (``Float``, ``Long``)."""
    return torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")


def resize(tensor: XLATensor, shape: tuple[int, ...]) -> None:
    """Give a tensor another shape, as ``resize_`` does: it shows the storage from its first element on.

    If the new shape fits in the storage, the tensor becomes a view of it, and other views do not change. For more
    elements, the tensor gets a storage of its own, in which the new elements are unwritten.
    """
    s, v = tensor._s, tensor._v
    meta = tensor_meta(shape, tensor.dtype)
    if meta is (v.meta if v is not None else s.meta):
        return
    trace = s.trace
    with trace.lock:
        start, room = _room(tensor) if v is not None else (0, s.meta.numel)
        if start + meta.numel <= room:
            resized = handler_of(_AS_STRIDED)((tensor, shape, _contiguous(shape), start), None)
        elif s.buffer is None and not trace.is_pending(s):
            resized = tensor.new_empty(shape)
        else:
            flat = handler_of(_AS_STRIDED)((tensor, (room - start,), (1,), start), None)
            padding = flat.new_empty(meta.numel - flat.numel())
            resized = torch.cat([flat, padding]).reshape(shape).clone()
    views.become(tensor, resized)


def _room(tensor: XLATensor) -> tuple[int, int]:
    """Where a view begins, and how many elements of its dtype there are from the storage's start on."""
    s, v = tensor._s, tensor._v
    place = geometry(s, v)
    base = chain(v)[place.skipped - 1].meta if place.skipped else s.meta
    return place.offset, base.numel * base.dtype.itemsize // tensor.dtype.itemsize


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = itertools.accumulate((max(size, 1) for size in shape[:0:-1]), operator.mul, initial=1)
    return tuple(steps)[::-1] if shape else ()


def zero_(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``zero_``: the former value is not read."""
    _fill(args[0], torch.ops.aten.zeros.default, ())
    return args[0]


def fill_(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``fill_`` with a number: the former value is not read. Raises for one that the dtype does not hold."""
    if isinstance(args[1], complex) or not args[0].is_floating_point():
        torch.empty((1,) * args[0].dim(), dtype=args[0].dtype).fill_(args[1])
    _fill(args[0], torch.ops.aten.full.default, (args[1],))
    return args[0]


def _fill(target: XLATensor, factory: OpOverload, extra: tuple[Operand, ...]) -> None:
    trace: Trace = target._s.trace
    with trace.bare:
        if trace.thread != get_ident():
            trace.turns.take()
        if target._v is not None and any(v.plan.repeats for v in chain(target._v)):
            target = _without_repeats(target)
        keywords = {"dtype": target.dtype, "device": target.device}
        filled = handler_of(factory)((list(target.shape), *extra), keywords)
        trace.write(target, filled._s.vid)


def _without_repeats(target: XLATensor) -> XLATensor:
    """A view of what an expanded tensor shows, each element once: PyTorch allows to fill it."""
    place = geometry(target._s, target._v)
    steps = zip(target.shape, place.stride, strict=True)
    shape = [min(size, 1) if step == 0 else size for size, step in steps]
    return handler_of(_AS_STRIDED)((target, shape, place.stride, place.offset), None)


_BATCH_NORM: Final = torch.ops.aten._native_batch_norm_legit_functional.default
_STATELESS_BATCH_NORM: Final = torch.ops.aten._native_batch_norm_legit.no_stats


def batch_norm_handler(overload: OpOverload) -> Handler | None:
    """The handler of a batch norm overload, whose schema hides that it writes to the running statistics."""
    if overload not in (
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
    ):
        return None
    pure = OperatorPlan(_BATCH_NORM, find_rule(_BATCH_NORM))
    without = functional_handler(
        OperatorPlan(_STATELESS_BATCH_NORM, find_rule(_STATELESS_BATCH_NORM)),
        "tuple",
    )

    def batch_norm(args: Operands, kwargs: NamedOperands | None) -> Operand:
        given = [*args, *(kwargs or {}).values()]
        source, _weight, _bias, mean, variance, training = given[:6]
        if mean is None or variance is None:
            return without((*given[:3], True, *given[6:8]), None)
        trace = source._s.trace
        with trace.lock:
            entry = trace.record(pure, given, None)
            if not training:
                # As on the CPU: nothing was computed from the batch, so nothing is saved.
                nothing = tensor_meta((0,), mean.dtype)
                saved = (trace.from_buffer(None, nothing) for _ in range(2))
                return trace.new_tensor(entry.metas[0], entry.first), *saved
            trace.write(mean, entry.first + 3)
            trace.write(variance, entry.first + 4)
            return wrap_results(trace, entry, "tuple")[:3]

    return batch_norm
