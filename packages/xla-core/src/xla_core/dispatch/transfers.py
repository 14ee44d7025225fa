"""Values that cross the device's border: uploads, downloads, copies between devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import get_ident
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from xla_core.contract.device_protocol import Buffer
from xla_core.dispatch.functional import find_trace
from xla_core.execution import deferred_steps
from xla_core.execution.runtime import trace_of
from xla_core.launching import buffer_donation, device_memory, launch_queue
from xla_core.operators import error_messages
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording import uninitialized
from xla_core.recording.storage import (
    MSG_PLACEHOLDER,
    PLACEHOLDER,
    HeldBuffer,
    NoValueError,
    Storage,
    View,
    chain,
    raise_if_poisoned,
)
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.support import counters
from xla_core.torch_bridge import dtypes
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands
from xla_core.varying.padded_buffer import exact_buffer

# Up to this size, the whole storage of a view is fetched, and the view is cut out on the host, which needs
# no program.
HOST_VIEW_BYTES: Final = 1 << 20

# Up to this number of elements, the extremes of uploaded integers are noted, by which operators that take
# indices refuse those out of range (``index_ranges``): 6 us for 1,000 elements, 50 us for the most.
MOST_NOTED: Final = 1 << 17
_INDEX_DTYPES: Final = (torch.int64, torch.int32)

MSG_META: Final = "Cannot copy out of meta tensor; no data!"
MSG_NOT_PINNED: Final = "cannot pin '{kind}' only dense CPU tensors can be pinned"


def read(tensor: XLATensor) -> torch.Tensor:
    """A contiguous CPU tensor with the value of ``tensor``; runs what is pending for it and waits.

    It has its own storage. Its strides are those that ``tensor`` reports, because callers that check
    ``tensor.is_contiguous()`` then write the bytes in memory order.
    """
    counters.increment("xla::_to_cpu")
    return _fetched(tensor)


def _fetched(tensor: XLATensor) -> torch.Tensor:
    """``read`` without its counter: copies to the CPU count as the operator that was called."""
    s = tensor._s
    trace = s.trace
    views = chain(tensor._v)
    meta = s.meta
    with trace.lock:
        if views and meta.nbytes > HOST_VIEW_BYTES:
            held = trace.new_tensor(views[-1].meta, trace.read_view(views[-1], s))
            s, meta, views = held._s, held._s.meta, []
        buffer = _held(trace, s)
    if buffer is None:
        return _seen_through(views, torch.zeros(meta.shape, dtype=meta.dtype))
    return _seen_through(views, dtypes.from_numpy(trace.backend.get(buffer), meta.dtype))


def in_buffer(tensor: XLATensor) -> torch.Tensor:
    """A CPU tensor with the value of ``tensor``, whose storage has a buffer: nothing runs, so no step is ended."""
    s = tensor._s
    return _seen_through(
        chain(tensor._v), dtypes.from_numpy(s.trace.backend.get(s.buffer), s.meta.dtype)
    )


def _seen_through(views: Sequence[View], host: torch.Tensor) -> torch.Tensor:
    """What ``views``, each of the one before it, show of a storage whose value is ``host``; contiguous."""
    for view in views:
        # a view of a conjugate's real part exists on the device, where nothing is conjugated lazily
        seen = view.plan.overload(host, *view.args).resolve_conj().resolve_neg()
        host = seen.clone(memory_format=torch.contiguous_format)
    return host


def materialise(trace: Trace, s: Storage) -> Buffer | None:
    """The storage's buffer, after running what is pending if necessary; None if it was never written to.

    A padded buffer is cut to the exact size.
    """
    return exact_buffer(_held(trace, s))


def _held(trace: Trace, s: Storage) -> HeldBuffer:
    if trace.unreadable is not None:
        raise error_messages.ValueNeededError(trace.unreadable)
    trace.compute(s, reading=True)
    if s.buffer is None:
        raise_if_poisoned(s)
    elif s.buffer is PLACEHOLDER:
        raise NoValueError(MSG_PLACEHOLDER)
    elif launch_queue.any_awaited():
        held = deferred_steps.held_by(trace, s)
        if s.buffer is None:
            raise_if_poisoned(s)
        return held
    return s.buffer


def upload(tensor: torch.Tensor, trace: Trace, dtype: torch.dtype | None = None) -> XLATensor:
    """A new ``xla`` tensor on the device of ``trace`` with the values of ``tensor``, which is on another device.

    It has ``dtype`` if that is given, and the tensor's own otherwise.
    """
    dtype = dtype or tensor.dtype
    meta = tensor_meta(tuple(tensor.shape), dtype)
    if _only_shape(tensor, trace):
        return trace.from_buffer(trace.backend.allocate(meta), meta)
    if not tensor.is_cpu:
        exchanged = device_memory.take(tensor.to(dtype), trace.backend)
        if exchanged is not None:
            return trace.from_buffer(exchanged, meta)
        tensor = tensor.cpu()
    array = dtypes.to_numpy(tensor if tensor.dtype == dtype else tensor.to(dtype))
    uploaded = trace.from_buffer(trace.backend.put(array), meta)
    if dtype in _INDEX_DTYPES and 0 < array.size <= MOST_NOTED:
        uploaded._s.note_extremes(int(array.min()), int(array.max()))
    return uploaded


def _only_shape(tensor: torch.Tensor, trace: Trace) -> bool:
    """Whether this uploads a ``meta`` tensor to a device whose tensors also have only shapes."""
    return tensor.device.type == "meta" and trace.backend.shapes_only


def across(tensor: XLATensor, trace: Trace) -> XLATensor:
    """A copy of ``tensor`` on another ``xla`` device."""
    source = tensor if tensor._v is None else tensor.clone()
    origin = source._s.trace
    with origin.lock:
        buffer = materialise(origin, source._s)
    moved = None if buffer is None else trace.backend.copy_from(buffer, origin.backend)
    return trace.from_buffer(moved, source._s.meta)


def leave(tensor: XLATensor, device: torch.device) -> torch.Tensor:
    """The values of ``tensor`` on ``device`` if memory can be copied there directly, else on the CPU."""
    if device.type != "cpu" and device_memory.reaches(tensor._s.trace.backend, device):
        source = tensor if tensor._v is None else tensor.clone()
        trace = source._s.trace
        with trace.lock:
            buffer = materialise(trace, source._s)
        left = None if buffer is None else device_memory.give(buffer, source.dtype, trace.backend)
        if left is not None:
            return left
    return _fetched(tensor)


def to_copy_handler(cast: Handler) -> Handler:
    """``_to_copy``: a cast on the device, which ``cast`` records, or a transfer."""

    def to_copy(args: Operands, kwargs: NamedOperands | None) -> Operand:
        source = args[0]
        named = kwargs or {}
        device = named.get("device")
        dtype = named.get("dtype") or source.dtype
        if not isinstance(source, XLATensor):
            counters.increment(counters.CREATED)
            return upload(source, trace_of(device), dtype)
        if device is None or device.type == "xla":
            target = source._s.trace if device is None else trace_of(device)
            if target is source._s.trace:
                return cast(args, kwargs)
            moved = across(source, target)
            return moved if dtype == moved.dtype else cast((moved,), {"dtype": dtype})
        if device.type == "meta":
            return torch.empty(source.shape, dtype=dtype, device=device)
        uninitialized.check_staying(source, device)
        counters.increment("xla::_to_copy")
        asked_for = named.get("memory_format") or torch.preserve_format
        return leave(source, device).to(device=device, dtype=dtype, memory_format=asked_for)

    return to_copy


def copy_(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``copy_`` between devices, or on one. A whole tensor of the same dtype just shares the value."""
    target, source = args[0], args[1]
    if not isinstance(target, XLATensor):
        return target.copy_(leave(source, target.device))
    trace = target._s.trace
    meta = target._v.meta if target._v is not None else target._s.meta
    if not isinstance(source, XLATensor):
        if not isinstance(source, torch.Tensor):
            source = torch.tensor(
                source
            )  # PyTorch passes a tensor made from a number as the number
        _copy_from_host(target, source, meta, trace)
        return target
    if source._s.trace is not trace:
        source = across(source, trace)
    with trace.bare:
        if trace.thread != get_ident():
            trace.turns.take()
        if source.dtype != meta.dtype:
            source = handler_of(torch.ops.aten._to_copy.default)((source,), {"dtype": meta.dtype})
        if source.shape != meta.shape:
            check_copy(source.shape, meta.shape)
            source = handler_of(torch.ops.aten.expand.default)((source, list(meta.shape)), None)
        trace.write(target, trace.value_of(source))
    return target


def check_copy(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    """Raise the error of ``copy_`` on the CPU if a shape cannot be broadcast to the target's."""
    fits = zip(reversed(source), reversed(target), strict=False)
    if len(source) > len(target) or any(have not in (1, want) for have, want in fits):
        torch.empty(target).copy_(torch.empty(()).expand(source))


def copy_from(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``_copy_from``: ``copy_`` with the source first, called by C++ below the Python key."""
    return copy_((args[1], args[0]), None)


def _copy_from_host(
    target: XLATensor, source: torch.Tensor, meta: TensorMeta, trace: Trace
) -> None:
    if source.device.type == "meta" and not trace.backend.shapes_only:
        raise NotImplementedError(MSG_META)
    if is_lazy(source):
        uninitialized.arrive(target, source)
        return
    if tuple(source.shape) != meta.shape:
        check_copy(source.shape, meta.shape)
        source = source.expand(meta.shape)
    counters.increment(counters.CREATED)
    fresh = upload(source, trace, meta.dtype)
    with trace.lock:
        s = target._s
        if target._v is None:
            s.replace_by(fresh._s)
        else:
            trace.write(target, trace.value_of(fresh))


def local_scalar(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``.item()``."""
    counters.increment(counters.SCALAR_READ)
    return read(args[0]).item()


def equal(args: Operands, _kwargs: NamedOperands | None) -> bool:
    """``torch.equal``."""
    first, second = args
    find_trace(args)
    if not (isinstance(first, XLATensor) and isinstance(second, XLATensor)):
        host = second if isinstance(first, XLATensor) else first
        raise error_messages.not_an_xla_tensor(host, "aten.equal", find_trace(args).device)
    if first.shape != second.shape:
        return False
    return bool(read(torch.eq(first, second).all()).item())


def allclose(args: Operands, kwargs: NamedOperands | None) -> bool:
    """``torch.allclose``."""
    return bool(read(torch.isclose(*args, **(kwargs or {})).all()).item())


def is_left_aligned(args: Operands, _kwargs: NamedOperands | None) -> bool:
    """``_nested_tensor_from_mask_left_aligned``, which TransformerEncoder asks on any device. Reads the mask."""
    values, mask = args
    sized = torch.zeros(()).expand(values.shape)  # only its size matters
    aligned: bool = torch._nested_tensor_from_mask_left_aligned(sized, read(mask))
    return aligned


def is_same_size(args: Operands, _kwargs: NamedOperands | None) -> bool:
    """``is_same_size``, which forward-mode AD calls for every tangent; reads no value."""
    return bool(args[0].shape == args[1].shape)


def has_same_storage_numel(args: Operands, _kwargs: NamedOperands | None) -> bool:
    """``_has_same_storage_numel``: whether two storages have the same number of elements."""
    room, other = (one.untyped_storage().nbytes() // one.element_size() for one in args)
    return bool(room == other)


def new_zeros_for_tangent(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``_new_zeros_with_same_feature_meta``: the zeros that a tangent of the second argument starts from."""
    tangent, primal = args
    batch = (kwargs or {}).get("self_num_batch_dims", 0)
    shape = [*tangent.shape[:batch], *primal.shape]
    return torch.zeros(shape, dtype=primal.dtype, device=primal.device)


def check_linalg(args: Operands, kwargs: NamedOperands | None) -> None:
    """``_linalg_check_errors``: raises for a matrix that could not be inverted or factored."""
    torch.ops.aten._linalg_check_errors(read(args[0]), *args[1:], **(kwargs or {}))


def empty(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``empty`` and ``empty_strided``; an unwritten tensor takes no memory."""
    named = kwargs or {}
    dtype = named.get("dtype") or torch.get_default_dtype()
    dtypes.numpy_dtype(dtype)
    return _unwritten(tuple(args[0]), dtype, trace_of(named.get("device") or torch.device("xla")))


def empty_permuted(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``empty_permuted``: like ``empty``, for any order of the elements.

    ``torch.empty_like(t, device="xla")`` of a ``meta`` tensor calls it, and therefore ``to_empty()`` of a
    model. Ahead of time, these are weights that will be loaded where the program runs, not zeros.
    """
    named = kwargs or {}
    tensor = empty((args[0],), named)
    trace = tensor._s.trace
    if trace.backend.shapes_only:
        tensor._s.bind(trace.backend.allocate(tensor._s.meta))
    return tensor


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype, trace: Trace) -> Operand:
    if any(size < 0 for size in shape):
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(shape)}: {list(shape)}"
        )
    tensor = trace.from_buffer(None, tensor_meta(shape, dtype))
    if fills_unwritten() and not trace.backend.shapes_only:
        handler_of(torch.ops.aten.fill_.Scalar)((tensor, unwritten_value(dtype)), None)
    return tensor


def fills_unwritten() -> bool:
    """Whether unwritten memory is filled with conspicuous values: by default with deterministic algorithms."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory
    )


def unwritten_value(dtype: torch.dtype) -> float | int | bool:
    """The value with which PyTorch fills such memory: NaN, the largest integer, or True."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def new_empty(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``new_empty``, ``new_empty_strided``: like ``empty``, with dtype and device from a tensor."""
    return _empty_as(args[0], tuple(args[1]), kwargs or {})


def empty_like(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``empty_like``: like ``empty``, with shape, dtype and device from a tensor."""
    return _empty_as(args[0], tuple(args[0].shape), kwargs or {})


def _empty_as(source: Operand, shape: tuple[int, ...], named: NamedOperands) -> Operand:
    dtype = named.get("dtype") or source.dtype
    device = named.get("device")
    if device is not None and device.type != "xla":
        return torch.empty(shape, dtype=dtype, device=device)
    trace = source._s.trace if device is None and isinstance(source, XLATensor) else None
    return _unwritten(shape, dtype, trace or trace_of(device or torch.device("xla")))


def set_buffer_donor(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """Mark the operand's value as given away, or remove the mark; returns the operand itself."""
    t, donated = [*args, *(kwargs or {}).values()]
    counters.increment("XlaSetBufferDonation")
    with t._s.trace.lock:
        deferred_steps.finish(t._s.trace)
        buffer_donation.mark(t._s, bool(donated))
    return t


def is_pinned(_args: Operands, _kwargs: NamedOperands | None) -> bool:
    """False: only memory of the host can be pinned."""
    return False


def pin_memory(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """Raises RuntimeError with PyTorch's message for other devices."""
    raise RuntimeError(MSG_NOT_PINNED.format(kind=args[0].type()))
