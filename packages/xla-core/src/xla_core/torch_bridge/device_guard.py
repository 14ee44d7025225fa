"""Gives PyTorch's ``xla`` device type the C++ device guard that autograd asks for.

A PyTorch build without torch_xla has no guard for device type XLA, so the first backward pass ends
in "PyTorch is not linked with support for xla devices". libc10 exports what is needed to
add one: ``c10::impl::registerDeviceGuard`` and the registry of guards. The guard made here is a
copy of the Meta device's, with the methods replaced that say which device is current and how many
there are. This module imports nothing but ctypes, torch and the declared environment variables, because it
runs at ``import torch``.

Private layout touched (seen in torch 2.11 to 2.15): the virtual method table of
``c10::impl::DeviceGuardImplInterface``, whose order is read from the header that torch ships and
verified by calling the Meta guard through it.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from pathlib import Path
from typing import Any, Final

import torch

from xla_core.support import flags
from xla_core.torch_bridge.operands import Operand

XLA_DEVICE_TYPE: Final = 9  # c10::DeviceType::XLA, c10/core/DeviceType.h (torch 2.11 to 2.15)
_META_DEVICE_TYPE: Final = 14  # c10::DeviceType::Meta, same header
_DEVICE_TYPES: Final = 20  # entries of the registry that are looked at; it has at least these
_REGISTER: Final = (
    "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
)
_REGISTRY: Final = "_ZN3c104impl26device_guard_impl_registryE"
_TORCH: Final = Path(torch.__file__).parent
_HEADER: Final = "include/c10/core/impl/DeviceGuardImplInterface.h"
_METHODS: Final = (
    "type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice", "deviceCount"
)  # fmt: skip

MSG_UNKNOWN_LAYOUT: Final = (
    "the xla device cannot attach itself to torch {version}: {what}. "
    "It knows the layout of torch 2.11 to 2.15; install one of those, or report this version."
)
MSG_OFFICIAL_PACKAGE: Final = (
    "another package has already registered the xla device with torch (the official torch_xla?). "
    "Only one can be used in a process: uninstall it (pip uninstall torch_xla) or use another environment."
)

# A c10::Device is two int8, type and index; it is passed and returned in one 16-bit register.
_TypeFn = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
_ExchangeFn = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_uint16)
_GetFn = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)
_SetFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint16)
_CountFn = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)

_keep_alive: list[object] = []
_current = threading.local()
_lock = threading.Lock()
_state: dict[str, Any] = {"registered": False, "count": None}


def current_index() -> int:
    """The calling thread's current ``xla`` device index; 0 unless set."""
    return getattr(_current, "index", 0)


def set_current_index(index: int) -> None:
    """Make ``xla:index`` the device that ``'xla'`` without an index means in this thread."""
    _current.index = index


def set_device_count(count: int) -> None:
    """Tell autograd how many devices there are; before this, an upper bound from the environment."""
    _state["count"] = count


def _device_count() -> int:
    known = _state["count"]
    if known is not None:
        return min(known, 127)
    text = flags.CPU_NUM_DEVICES.text()
    return max(8, min(int(text), 127)) if text.isdigit() else 8


def _pack(index: int) -> int:
    return XLA_DEVICE_TYPE | (index & 0xFF) << 8


def _set(_self: int, device: int) -> None:
    index = device >> 8
    if index < 128:  # an index of -1 means "the current one" and changes nothing
        _current.index = index


def _unknown_layout(what: str) -> RuntimeError:
    return RuntimeError(MSG_UNKNOWN_LAYOUT.format(version=torch.__version__, what=what))


def _method_order() -> list[str]:
    try:
        text = (_TORCH / _HEADER).read_text(encoding="utf-8")
    except OSError as error:
        raise _unknown_layout(f"its header {_HEADER} cannot be read ({error})") from None
    body = text[text.index("struct C10_API DeviceGuardImplInterface") :].split("\n};", 1)[0]
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.S)
    order = re.findall(r"virtual\s+[\w:*&\s]*?[\s*&](~?\w+)\s*\(", body)
    if not set(_METHODS) <= set(order):
        raise _unknown_layout(
            "the device guard interface lacks " + ", ".join(set(_METHODS) - set(order))
        )
    return order


def _verify(meta: int, table: Operand, order: list[str]) -> None:
    """Call the Meta guard's methods through the table: right answers mean the slots are right."""
    slot = {name: table[order.index(name)] for name in _METHODS}
    answers = (
        _TypeFn(slot["type"])(meta),
        _GetFn(slot["getDevice"])(meta),
        _ExchangeFn(slot["exchangeDevice"])(meta, _META_DEVICE_TYPE),
        _CountFn(slot["deviceCount"])(meta),
    )
    nowhere = _META_DEVICE_TYPE | 0xFF00
    if answers != (_META_DEVICE_TYPE, nowhere, nowhere, 1):
        raise _unknown_layout(f"its device guards answer {answers}")


def _build_guard(meta: int, order: list[str]) -> int:
    size = ctypes.sizeof(ctypes.c_void_p)
    table_address = ctypes.c_void_p.from_address(meta).value or 0
    # Itanium C++ ABI: the address point is preceded by offset-to-top and the type information;
    # a virtual destructor takes two slots.
    table = (ctypes.c_void_p * (len(order) + 3)).from_address(table_address - 2 * size)
    _verify(meta, table[2:], order)
    copy = (ctypes.c_void_p * len(table))(*table)
    # exchangeDevice and uncheckedSetDevice stay the Meta guard's, which do nothing: C++ calls them
    # around every operator, and on the way out while a Python exception is set, when no Python
    # code may run. Operators name their device, so nothing is lost.
    callbacks = {
        "type": _TypeFn(lambda _self: XLA_DEVICE_TYPE),
        "getDevice": _GetFn(lambda _self: _pack(current_index())),
        "setDevice": _SetFn(_set),
        "deviceCount": _CountFn(lambda _self: _device_count()),
    }
    for name, callback in callbacks.items():
        copy[2 + order.index(name)] = ctypes.cast(callback, ctypes.c_void_p).value
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(copy) + 2 * size)
    _keep_alive.extend((copy, guard, callbacks))
    return ctypes.addressof(guard)


def register() -> None:
    """Register the guard, once per process.

    Raises RuntimeError naming the torch version when its layout is not the known one, and when
    another package has already registered the device.
    """
    with _lock:
        if _state["registered"]:
            return
        if sys.byteorder != "little":
            raise _unknown_layout("this processor is big-endian")
        library = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
        try:
            c10 = ctypes.CDLL(str(_TORCH / "lib" / library))
            registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(c10, _REGISTRY)
            register_guard = getattr(c10, _REGISTER)
        except (OSError, AttributeError, ValueError) as error:
            raise _unknown_layout(
                f"{library} does not offer the device guard registry ({error})"
            ) from None
        if registry[XLA_DEVICE_TYPE]:
            raise RuntimeError(MSG_OFFICIAL_PACKAGE)
        meta = registry[_META_DEVICE_TYPE]
        if not meta:
            raise _unknown_layout("it has no guard for the meta device")
        guard = _build_guard(meta, _method_order())
        register_guard.argtypes = [ctypes.c_int8, ctypes.c_void_p]
        register_guard.restype = None
        register_guard(XLA_DEVICE_TYPE, guard)
        _state["registered"] = True
