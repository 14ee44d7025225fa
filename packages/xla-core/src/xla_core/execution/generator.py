"""``torch.Generator(device="xla")``: a source of seeds of its own, beside those of the devices.

It is one of PyTorch's generators of the CPU that says it is on an ``xla`` device: state, seed and
their errors are PyTorch's. Every random operator that gets it draws one seed from it when it is recorded.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from xla_core.execution import runtime
from xla_core.recording import random_state
from xla_core.torch_bridge.torch_private import GeneratorBase, make_generators_with

MSG_OTHER_DEVICE: Final = "Expected a 'xla' device type for generator but found '{device}'"

# By the address of the C++ generator: operators are called with another Python object for it.
_known: weakref.WeakValueDictionary[int, XLAGenerator] = weakref.WeakValueDictionary()


class XLAGenerator(GeneratorBase):  # type: ignore[misc, valid-type]
    """A generator of an ``xla`` device; ``torch.Generator(device="xla")`` makes one."""

    _device: torch.device

    def __new__(cls, device: torch.device | str = "xla") -> XLAGenerator:
        """A generator with PyTorch's default seed. Raises IndexError when there is no such device."""
        generator = super().__new__(cls)
        generator._device = runtime.trace_of(torch.device(device)).device
        _known[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The ``xla`` device that it was made for."""
        return self._device

    def clone_state(self) -> XLAGenerator:
        """Another generator in the state of this one."""
        clone = XLAGenerator(self._device)
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (str(self._device), self.get_state())


def _rebuild(device: str, state: torch.Tensor) -> XLAGenerator:
    generator = XLAGenerator(device)
    generator.set_state(state)
    return generator


def seed_from(generator: torch.Generator) -> int:
    """The next seed of a generator that an operator on an ``xla`` device got.

    Raises RuntimeError for a generator of another device, as other devices do.
    """
    if generator._cdata not in _known:
        raise RuntimeError(MSG_OTHER_DEVICE.format(device=generator.device.type))
    return random_state.derived_seed(
        int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    )


def install() -> None:
    """Let ``torch.Generator`` make generators of ``xla`` devices, too; once."""
    make_generators_with(XLAGenerator)
