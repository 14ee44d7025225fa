"""Parameters and buffers of lazy modules (``nn.LazyLinear``) on an ``xla`` device, before their first use.

``module.to("xla")`` copies each parameter into a new tensor, which would then count as initialized and have no
elements. The tensors made here remain uninitialized, and have the dtype and the device of the later parameter.
``nn.LazyLinear(3, device="xla")`` creates them on the device directly; torch would try to turn an
``XLATensor`` into its own class, and fail.
"""

from __future__ import annotations

import functools
import inspect
from typing import Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from xla_core.contract.foreign_values import AnyFunction
from xla_core.recording.xla_tensor import XLATensor, XLATensorType

MSG_LEAVING: Final = (
    "an uninitialized parameter or buffer cannot be moved from {device} to {target}: move the lazy module after "
    "its first forward pass, or make it on {target}"
)


class _Type(XLATensorType, type(UninitializedParameter)):  # type: ignore[misc]
    pass


class _Uninitialized:
    """Methods of both kinds, which precede those of torch's classes."""

    __slots__ = ()
    cls_to_become = XLATensor

    def detach(self: torch.Tensor) -> torch.Tensor:
        """A new uninitialized tensor, because ``nn.Parameter()`` and ``state_dict()`` detach their arguments."""
        return self._like(False)

    def requires_grad_(self: object, requires_grad: bool = True) -> object:
        """The same as ``Tensor.requires_grad_``."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(self) not in memo:
            copied = memo[id(self)] = self._like(self.requires_grad)
            copied.__dict__.update(self.__dict__)
        return memo[id(self)]

    def __reduce_ex__(self: torch.Tensor, protocol: object) -> tuple[object, ...]:
        kind = (
            UninitializedBuffer if isinstance(self, UninitializedBuffer) else UninitializedParameter
        )
        return kind, (self.requires_grad,)

    def _like(self: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        copied: torch.Tensor = torch.empty(0, dtype=self.data.dtype, device=self.data.device)
        copied.__class__ = type(self)
        return copied.requires_grad_(requires_grad)


class UninitializedXLAParameter(  # type: ignore[misc]
    _Uninitialized, UninitializedParameter, XLATensor, metaclass=_Type
):
    """An ``UninitializedParameter`` on an ``xla`` device."""

    __slots__ = ()


class UninitializedXLABuffer(  # type: ignore[misc]
    _Uninitialized, UninitializedBuffer, XLATensor, metaclass=_Type
):
    """An ``UninitializedBuffer`` on an ``xla`` device."""

    __slots__ = ()


def arrive(target: object, source: torch.Tensor) -> None:
    """Mark ``target``, a new tensor to which ``source`` was copied, as uninitialized like ``source``."""
    is_buffer = isinstance(source, UninitializedBuffer)
    target.__class__ = UninitializedXLABuffer if is_buffer else UninitializedXLAParameter
    target.__dict__.update(source.__dict__)


def check_staying(source: torch.Tensor, target: object) -> None:
    """Raise RuntimeError if ``source`` is uninitialized and would leave the device for ``target``.

    torch would consider the copy there initialized.
    """
    if is_lazy(source):
        raise RuntimeError(MSG_LEAVING.format(device=source.data.device, target=target))


def install() -> None:
    """Make torch's two classes also create uninitialized tensors on ``xla`` devices. Works once."""
    for kind, own in _OWN.items():
        if not hasattr(kind.__new__, "__wrapped__"):
            kind.__new__ = _making(kind, own)


_OWN: Final[dict[type[torch.Tensor], type[torch.Tensor]]] = {
    UninitializedParameter: UninitializedXLAParameter,
    UninitializedBuffer: UninitializedXLABuffer,
}


def _making(kind: type[torch.Tensor], own: type[torch.Tensor]) -> AnyFunction:
    former = kind.__new__
    signature = inspect.signature(former)

    @functools.wraps(former)
    def make(cls: type[torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        given = signature.bind(cls, *args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        tensor: torch.Tensor = torch.empty(0, device=asked["device"], dtype=asked["dtype"])
        if cls is not kind or not isinstance(tensor, XLATensor):
            return former(cls, *args, **kwargs)
        tensor.__class__ = own
        if kind is UninitializedParameter:
            tensor._is_param = True
        else:
            tensor._is_buffer = True
            tensor.persistent = asked.get("persistent", True)
        return tensor.requires_grad_(asked["requires_grad"])

    return make
