"""``XLATensor``: the tensor subclass whose device is ``xla``.

Autograd, hooks, ``nn.Parameter``, optimizers and views are PyTorch's own. The class only defines, in
``__torch_dispatch__``, what an operator does below them.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import strided
from torch._ops import OpOverload
from torch._tensor import _rebuild_from_type_v2
from torch._utils import (
    _rebuild_device_tensor_from_cpu_tensor,
    _rebuild_parameter,
    _rebuild_parameter_with_state,
)

from xla_core.contract.foreign_values import AnyFunction
from xla_core.recording import untyped_storage
from xla_core.recording.storage import Storage, View
from xla_core.support import indivisible
from xla_core.torch_bridge import torch_private
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

MSG_NOT_NUMPY: Final = (
    "can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
    "memory first."
)

MSG_OWN_DISPATCH: Final = (
    "a tensor on an xla device cannot be a {cls}: the class has a __torch_dispatch__ of its own. Make it a wrapper "
    "around xla tensors, or define __torch_function__ instead"
)
MSG_NO_CLASS: Final = "a tensor on an xla device cannot be a {cls}: {reason}"

# The host copies that pickle has in hand, and the versions of the storages that they were read at.
_pickled: Final[weakref.WeakKeyDictionary[Storage, tuple[weakref.ref[torch.Tensor], int]]] = (
    weakref.WeakKeyDictionary()
)

Handler = Callable[[Operands, NamedOperands | None], Operand]

# Keyed by id(): an OpOverload's __hash__ is a Python function.
handlers: dict[int, Handler] = {}
# A library's operators end with it: without these another operator could get such an id, and with it the handler.
_overloads: dict[int, object] = {}


class NoMetaKernelError(Exception):
    """PyTorch cannot infer an operator's results without values; the operator then runs on the CPU."""


def _no_dispatch(_overload: object) -> Handler:
    raise RuntimeError("xla_core.dispatch has not been imported")


_make_handler: Callable[[object], Handler] = _no_dispatch
_make_fallback: Callable[[object], Handler] = _no_dispatch


def set_handler_factory(
    factory: Callable[[object], Handler], on_cpu: Callable[[object], Handler]
) -> None:
    """Register ``factory``, which makes the handler of an operator overload at its first call.

    ``on_cpu`` makes the handler that runs the overload on the CPU after a ``NoMetaKernelError``.
    """
    global _make_handler, _make_fallback
    _make_handler = factory
    _make_fallback = on_cpu


_chosen: dict[int, Handler] = {}  # set by extensions; the factory could not make them again
_plain: dict[int, Handler] = {}
_wrap: Callable[[Handler], Handler] | None = None


def set_handler_wrapper(wrap: Callable[[Handler], Handler] | None) -> None:
    """From now on, call every handler through ``wrap(handler)``, or directly (None)."""
    global _wrap
    _wrap = wrap
    handlers.clear()


def go_on_with_handlers(resolved: dict[int, Handler]) -> dict[int, Handler]:
    """Replace the handlers by ``resolved`` (by ids of overloads), and return the former ones.

    Other handlers are made again when they are needed; those set by ``set_handler`` remain.
    """
    global _plain
    former, _plain = _plain, {**resolved, **_chosen}
    handlers.clear()
    return former


def set_handler(overload: OpOverload, handler: Handler) -> None:
    """Handle ``overload`` by ``handler`` instead of the handler that its schema leads to."""
    _overloads[id(overload)] = overload
    _chosen[id(overload)] = _plain[id(overload)] = handler
    handlers.pop(id(overload), None)


def forget_handler(overload: OpOverload) -> None:
    """Make the handler of ``overload`` again when it is next called."""
    _plain.pop(id(overload), None)
    handlers.pop(id(overload), None)


def handler_of(overload: OpOverload) -> Handler:
    """The function that handles ``overload`` on ``xla`` tensors."""
    handler = handlers.get(id(overload))
    if handler is None:
        handler = _plain.get(id(overload))
        if handler is None:
            _overloads[id(overload)] = overload
            handler = _plain[id(overload)] = _make_handler(overload)
        if _wrap is not None:
            handler = _wrap(handler)
        handlers[id(overload)] = handler
    return handler


def through_wrapper(handler: Handler) -> Handler:
    """``handler`` itself, or wrapped if handlers are called through a wrapper now (eager mode)."""
    return handler if _wrap is None else _wrap(handler)


class Replacements:
    """How often storages were replaced (``count``) and ``requires_grad`` set (``flags``; by id in ``flagged``)."""

    count = flags = 0
    flagged: dict[int, bool] | None = None  # to what it was before


def _note_flag(tensor: torch.Tensor) -> None:
    Replacements.flags += 1
    if Replacements.flagged is not None:
        Replacements.flagged.setdefault(id(tensor), tensor.requires_grad)


def _set_requires_grad(tensor: torch.Tensor, value: bool) -> None:
    _note_flag(tensor)
    torch_private.set_requires_grad(tensor, value)


_attributes: Final = vars(torch.Tensor)["__dict__"]


def _set_attributes(tensor: torch.Tensor, value: dict[str, object]) -> None:
    Replacements.count += 1
    _note_flag(tensor)
    _attributes.__set__(tensor, value)


def become(target: XLATensor, source: XLATensor, like: torch.Tensor | None = None) -> None:
    """Make ``target`` share the storage and view of ``source`` from now on.

    Its C++ part becomes like that of ``like`` (default: ``source``), which has the same shape and dtype.
    Raises PyTorch's RuntimeError if the C++ parts of the two are incompatible.
    """
    metadata = map(torch_private.set_data, (target,), (source if like is None else like,))
    shown = indivisible.storing(target, ("_s", "_v"), (source._s, source._v))
    Replacements.count += 1
    indivisible.do(metadata, shown)


class XLATensorType(type(torch.Tensor)):  # type: ignore[misc]
    """The metaclass of ``XLATensor``, which answers torch.compile's questions about the class."""


class _UsersClassType(XLATensorType):
    """The metaclass of classes made by ``as_subclass``: calling one calls the user's class."""

    def __call__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        return cls.__bases__[0](*args, **kwargs)


class XLATensor(torch.Tensor, metaclass=XLATensorType):
    """A tensor on an ``xla`` device; made by factories and ``.to('xla')``."""

    __slots__ = ("_s", "_v")
    _s: Storage
    _v: View | None

    __torch_function__ = torch_private.disabled_torch_function

    def __new__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        """What ``torch.Tensor`` makes of these arguments, or ``nn.Parameter`` if ``requires_grad`` is among them.

        Libraries call ``type(parameter)(value, requires_grad=...)`` and ``type(tensor)(value)``.
        """
        kind = torch.nn.Parameter if "requires_grad" in kwargs else torch.Tensor
        return kind(*args, **kwargs)

    @staticmethod
    def __torch_dispatch__(
        func: object,
        types: object,
        args: Operands = (),
        kwargs: NamedOperands | None = None,
    ) -> Operand:
        handler = handlers.get(id(func))
        if handler is None:
            handler = handler_of(func)
        try:
            return handler(args, kwargs)
        except NoMetaKernelError:
            return _make_fallback(func)(args, kwargs)

    @property
    def data(self) -> torch.Tensor:
        """A tensor on the same storage that autograd does not see."""
        return torch_private.get_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, XLATensor):
            raise RuntimeError(
                f"cannot set .data of a tensor on {self.device} to a tensor on {value.device}; "
                f"move it first: .to('{self.device}')"
            )
        become(self, value)

    # torch.utils.swap_tensors sets it, and then exchanges the storages of two tensors
    __dict__ = property(_attributes.__get__, _set_attributes)  # type: ignore[assignment]

    # the getter is a function of C's
    requires_grad = property(torch_private.get_requires_grad, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """The same as ``Tensor.requires_grad_``."""
        _note_flag(self)
        return super().requires_grad_(requires_grad)

    def detach_(self) -> torch.Tensor:
        """The same as ``Tensor.detach_``."""
        _note_flag(self)
        return super().detach_()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        host = self.detach().cpu()
        name = type(self).__name__ if is_users_class(type(self)) else "tensor"
        text = torch_private.tensor_text(host, self, name)
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __format__(self, spec: str) -> str:
        # torch formats a number only for its own class
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def untyped_storage(self) -> object:
        """An object with the identity and the size of the storage, but without memory."""
        if torch_private.asked_by_fake_tensors():
            return super().untyped_storage()
        return untyped_storage.StorageHandle(self._s)

    def _typed_storage(self) -> object:
        what = "used as a typed storage, or moved to shared memory"
        raise RuntimeError(untyped_storage.MSG_NO_MEMORY.format(device=self.device, what=what))

    def is_shared(self) -> bool:
        """False: other processes cannot see the values."""
        return False

    def data_ptr(self) -> int:
        """An artificial address that aliases share, too large for a pointer; see ``untyped_storage``."""
        return untyped_storage.address(self._s, self._v)

    def contiguous(
        self, *, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        """The tensor itself, or a copy if a CPU tensor with the same views would be copied.

        All ``xla`` tensors report that they are contiguous, but a write to ``w.t().contiguous()``
        must not change ``w``.
        """
        if self._v is not None and not untyped_storage.is_dense(self._s, self._v):
            return self.clone()
        return super().contiguous(memory_format=memory_format)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """With ``force``, a numpy array with the values; otherwise raises TypeError, like PyTorch."""
        if not force:
            raise TypeError(MSG_NOT_NUMPY.format(device=self.device))
        return self.detach().cpu().numpy(force=True)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy()

    def tolist(self) -> object:
        """The values as a number or nested lists of numbers."""
        return self.detach().cpu().tolist()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        rebuild, values = self._reduced()
        state = attributes_of(self)
        # with a history, rebuilding the attributes would make the tensor a result instead of a leaf
        if state and rebuild is _rebuild_device_tensor_from_cpu_tensor and not self.requires_grad:
            return _rebuild_from_type_v2, (rebuild, torch.Tensor, values, state)
        return rebuild, values

    def _reduced(self) -> tuple[AnyFunction, tuple[object, ...]]:
        """The function that rebuilds the tensor, and its arguments; only parameters include their attributes."""
        if getattr(self, "_is_param", False):
            parts: tuple[object, ...] = (self.data, self.requires_grad, {})
            state = attributes_of(self)
            if state:
                return _rebuild_parameter_with_state, (*parts, state)
            return _rebuild_parameter, parts
        rebuilt = (self._pickled_value(), self.dtype, str(self.device), self.requires_grad)
        return _rebuild_device_tensor_from_cpu_tensor, rebuilt

    def _pickled_value(self) -> torch.Tensor:
        """The value on the CPU: one object, which pickle writes once, for all that show one storage whole."""
        s = self._s
        if self._v is not None or self.requires_grad:  # the CPU tensor may become the loaded one
            return self.detach().cpu()
        known, version = _pickled.get(s, (None, 0))
        cpu = None if known is None else known()
        if cpu is None or version != s.version or cpu._version:
            cpu = self.detach().cpu()
            _pickled[s] = (weakref.ref(cpu), s.version)
        return cpu

    def as_subclass(self, cls: type[torch.Tensor]) -> torch.Tensor:
        """An alias that is a ``cls``, which is a subclass of ``torch.Tensor``.

        Its class is a subclass of ``cls`` with the same name. Raises TypeError if there cannot be one.
        """
        with torch_private.without_torch_function():
            alias = torch.ops.aten.alias.default(self)
        if not issubclass(XLATensor, cls):
            alias.__class__ = _on_xla(cls)
        return alias

    def __coerce_same_metadata_as_tangent__(
        self, _metadata: object, _type: object = None
    ) -> XLATensor:
        # torch.compile traced plain tensors, and expects a gradient of this class
        return self

    def __copy__(self) -> torch.Tensor:
        # Of the same storage, as on the CPU; through ``__reduce_ex__`` it would be another, read on the host.
        with torch.no_grad():
            copied = self.view_as(self).detach()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        for name, value in attributes_of(self).items():
            setattr(copied, name, value)
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol "
                "at the moment.  If you were attempting to deepcopy a module, this may be because of a "
                "torch.nn.utils.weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
            )
        with torch.no_grad():
            copied = self.clone()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        for name, value in attributes_of(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied


def attributes_of(tensor: XLATensor) -> dict[str, object]:
    """The Python attributes that were set on a tensor, without PyTorch's mark of parameters."""
    return {name: value for name, value in tensor.__dict__.items() if name != "_is_param"}


_classes_on_xla: Final[dict[type, type[XLATensor]]] = {}


def is_users_class(cls: type) -> bool:
    """Whether tensors of ``cls`` were made by ``as_subclass``."""
    return isinstance(cls, _UsersClassType)


def _on_xla(cls: type[torch.Tensor]) -> type[XLATensor]:
    """The class of ``xla`` tensors that are a ``cls``."""
    if issubclass(cls, XLATensor):
        return cls
    if cls not in _classes_on_xla:
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(MSG_OWN_DISPATCH.format(cls=cls.__qualname__))
        try:
            _classes_on_xla[cls] = _make_class(cls)
        except TypeError as error:
            raise TypeError(MSG_NO_CLASS.format(cls=cls.__qualname__, reason=error)) from error
    return _classes_on_xla[cls]


# Of the methods above those that call operators: a class may have its say, as in torch's own.
_OF_PYTHON: Final = ("__repr__", "__format__", "contiguous", "numpy", "__array__", "tolist")
_COPYING: Final = ("__copy__", "__deepcopy__")


def _make_class(cls: type[torch.Tensor]) -> type[XLATensor]:
    """A subclass of ``cls`` and ``XLATensor``, to which the class of an ``XLATensor`` may be set."""

    def __torch_function__(
        _cls: type,
        func: AnyFunction,
        types: tuple[type, ...],
        args: Operands = (),
        kwargs: NamedOperands | None = None,
    ) -> Operand:
        # results on other devices are of ``cls`` itself
        known = tuple(cls if one is combined else one for one in types)
        return cls.__torch_function__(func, known, args, kwargs or {})

    def __reduce_ex__(self: XLATensor, protocol: object) -> tuple[object, ...]:
        with torch_private.without_torch_function():
            rebuild, values = self._reduced()
        return _rebuild_from_type_v2, (rebuild, cls, values, dict(self.__dict__))

    disabled = cls.__torch_function__ is torch_private.disabled_torch_function
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        # where torch.compile looks for it
        "__torch_dispatch__": XLATensor.__dict__["__torch_dispatch__"],
        "__torch_function__": (
            torch_private.disabled_torch_function if disabled else classmethod(__torch_function__)
        ),
        "__reduce_ex__": __reduce_ex__,
    }
    members |= {} if disabled else {name: _asking(cls, name) for name in _OF_PYTHON}
    members |= {name: _copying(name) for name in _COPYING}
    for name in (*_OF_PYTHON, *_COPYING, "__reduce_ex__"):
        if getattr(cls, name, None) is not getattr(torch.Tensor, name, None):
            members.pop(name, None)
    combined: type[XLATensor] = _UsersClassType(cls.__name__, (cls, XLATensor), members)
    return combined


def _asking(cls: type[torch.Tensor], name: str) -> Callable[..., object]:
    """``XLATensor``'s method ``name``, called through ``cls.__torch_function__``."""
    method = getattr(XLATensor, name)

    @functools.wraps(method)
    def call(self: XLATensor, *args: object, **kwargs: object) -> object:
        return cls.__torch_function__(method, (cls,), (self, *args), kwargs)

    return call


def _copying(name: str) -> Callable[..., object]:
    """``XLATensor``'s method ``name``, whose result gets the class of the tensor."""
    method = getattr(XLATensor, name)

    @functools.wraps(method)
    def call(self: XLATensor, *args: object) -> torch.Tensor:
        with torch_private.without_torch_function():
            copied = method(self, *args)
        copied.__class__ = type(self)
        return copied

    return call


def tensor_on(
    storage: Storage,
    view: View | None = None,
    make: Callable[..., torch.Tensor] = torch_private.make_wrapper,
    kind: type[XLATensor] = XLATensor,
    strides: tuple[int, ...] | None = None,
    offset: int | None = None,
) -> XLATensor:
    """A new tensor that shows ``storage`` through ``view`` (default: all of it), without autograd.

    ``make`` makes its C++ part, ``kind`` is its class. ``strides`` and ``offset`` are those that the C++ part
    reports (default: contiguous). Called by each operator that returns a view.
    """
    meta = storage.meta if view is None else view.meta
    device = storage.trace.device
    t: XLATensor = make(kind, meta.shape, strides, offset, None, meta.dtype, strided, device)
    t._s = storage
    t._v = view
    return t
