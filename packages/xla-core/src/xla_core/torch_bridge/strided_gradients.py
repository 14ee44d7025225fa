"""What autograd notes of the tensor that ``as_strided`` gets: its true strides and offset.

The gradient of ``as_strided`` scatters into a storage and looks at it as the operand did; for that autograd reads
the operand's strides. All ``xla`` tensors say that they are contiguous, which is not true of views. So kernels of
our own stand before autograd's, only for ``as_strided`` and related operators, and give it an alias that says what
is true. Seen in torch 2.11 to 2.15.

Callers read strides, too: ``x.as_strided(size, (x.stride(0) // 2, x.stride(1)))`` without an offset is how
windows are made. Such strides count what ``x`` reports; here they become the true ones of the same steps. With an
offset, strides and offset count the elements of the storage, as on the CPU. So autograd repeats views: the strides
that it has kept are true already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload

from xla_core.torch_bridge.torch_private import set_data

aten = torch.ops.aten

_OURS = torch._C.DispatchKey.AutogradXLA  # torch 2.11 to 2.15
# Another key for which PyTorch has the same kernel: redispatching there calls it, and not ours again.
_PYTORCHS = torch._C.DispatchKey.AutogradOther  # torch 2.11 to 2.15
_PYTHON_DISPATCHER = torch._C.DispatchKey.PythonDispatcher  # torch 2.11 to 2.15

_wrapping = torch._C._functorch  # torch 2.11 to 2.15

MSG_TRANSFORMED: Final = (
    "torch.func cannot differentiate {operator} of a view on an xla device: the transform does not see where "
    "the view lies in its storage; use slices, or call .clone() on the view before"
)

SHIFT: Final = "_xla_as_strided_shift"
"""The attribute of a tensor: what ``as_strided`` has to add to the offset that it is given with the tensor."""

Place = tuple[torch.Tensor, int]
"""A tensor whose C++ part has a view's strides and an offset; what is to be added to such offsets."""

_libraries: list[torch.library.Library] = []  # a library's registrations end with the object


def in_storage(shape: Sequence[int], true: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides over the storage for ``strides``, which count the elements of a view as if it were contiguous.

    ``true`` are the strides with which the view of this shape looks at its storage. A step through the view is so
    many steps along its dimensions, the first dimension first.
    """
    dims = [(size, step) for size, step in zip(shape, true, strict=True) if size > 1]
    if not dims:
        return list(strides)
    counted, unit = [], 1  # the view's strides as it reports them, the last dimension first
    for size, step in reversed(dims):
        counted.append((unit, step))
        unit *= size
    translated = []
    for stride in strides:
        total = 0
        for reported, step in reversed(counted):
            steps, stride = divmod(stride, reported)
            total += steps * step
        translated.append(total)
    return translated


def register(place_of: Callable[[torch.Tensor], Place | None]) -> None:
    """Ask ``place_of(tensor)`` where a view lies; None where the tensor itself tells."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    for overload in (aten.as_strided.default, aten.as_strided_copy.default):
        library.impl(overload, _of_alias(overload, place_of), "AutogradXLA", with_keyset=True)
    in_place = _in_place(aten.as_strided_.default, place_of)
    library.impl(aten.as_strided_.default, in_place, "AutogradXLA", with_keyset=True)
    _libraries.append(library)


def _check_transforms(
    tensor: torch.Tensor, overload: OpOverload, place_of: Callable[..., object]
) -> None:
    """Refuse a view inside ``torch.func.grad``, whose wrapper's strides cannot be set."""
    if not _wrapping.is_functorch_wrapped_tensor(tensor):
        return
    interpreter = _wrapping.peek_interpreter_stack()
    if interpreter is None or interpreter.key() != _wrapping.TransformType.Grad:
        return
    while _wrapping.is_functorch_wrapped_tensor(tensor):
        tensor = _wrapping.get_unwrapped(tensor)
    if place_of(tensor) is not None:
        raise RuntimeError(MSG_TRANSFORMED.format(operator=overload._schema.name))


def _past_ours(keys: Any) -> object:
    """The keys with which redispatching calls PyTorch's kernel for autograd.

    While Dynamo traces, another key would look the kernel up again by the tensor's keys, and find ours.
    """
    return keys.remove(_PYTHON_DISPATCHER).remove(_OURS).add(_PYTORCHS)


def _of_alias(overload: OpOverload, place_of: Callable[..., Place | None]) -> object:
    def as_strided(
        keys: object, tensor: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None
    ) -> torch.Tensor:
        _check_transforms(tensor, overload, place_of)
        place = place_of(tensor)
        if place is not None:
            true, shift = place
            if storage_offset is None:
                stride = in_storage(tensor.shape, true.stride(), stride)
            tensor = aten.alias.default(tensor)
            set_data(tensor, true)
            setattr(tensor, SHIFT, shift)
            storage_offset = _shifted(storage_offset, true, shift)
        keys = _past_ours(keys)
        return overload.redispatch(keys, tensor, size, stride, storage_offset)

    return as_strided


def _in_place(overload: OpOverload, place_of: Callable[..., Place | None]) -> object:
    def as_strided_(
        keys: object, tensor: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None
    ) -> torch.Tensor:
        _check_transforms(tensor, overload, place_of)
        place = place_of(tensor)
        keys = _past_ours(keys)
        if place is None:
            return overload.redispatch(keys, tensor, size, stride, storage_offset)
        true, shift = place
        if storage_offset is None:
            stride = in_storage(tensor.shape, true.stride(), stride)
        former = tensor.detach()
        set_data(tensor, true)
        setattr(tensor, SHIFT, shift)
        try:
            offset = _shifted(storage_offset, true, shift)
            return overload.redispatch(keys, tensor, size, stride, offset)
        except BaseException:
            set_data(tensor, former)
            raise
        finally:
            delattr(tensor, SHIFT)

    return as_strided_


def _shifted(offset: int | None, true: torch.Tensor, shift: int) -> int:
    return true.storage_offset() if offset is None else offset - shift
