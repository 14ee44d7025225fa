"""The device that a generator has in C++, where every device's operators look at it."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from xla_core.torch_bridge import device_guard
from xla_core.torch_bridge.torch_private import GeneratorBase

MSG_UNKNOWN_LAYOUT: Final = (
    "a generator of an xla device cannot be made with torch {version}, which keeps a generator's device at "
    "an unknown place; install torch 2.11 to 2.15"
)

_CPU: Final = b"\x00\xff"  # c10::Device: the type, and an index of -1
# torch 2.11 to 2.15: c10::GeneratorImpl has a table of methods, a count of references, a mutex, and then the
# device. How long the count and the mutex are depends on version and platform.
_OFFSETS: Final = range(16, 104, 8)


def set_device(generator: Any, index: int) -> None:
    """Let a generator of the CPU say that it is on ``xla:index``. Raises RuntimeError if it cannot be made to."""
    wanted = torch.device("xla", index)
    for offset in _OFFSETS:
        place = (ctypes.c_ubyte * 2).from_address(generator._cdata + offset)
        if bytes(place) != _CPU:
            continue
        place[:] = [device_guard.XLA_DEVICE_TYPE, index]
        if GeneratorBase.device.__get__(generator) == wanted:
            return
        place[:] = list(_CPU)
    raise RuntimeError(MSG_UNKNOWN_LAYOUT.format(version=torch.__version__))
