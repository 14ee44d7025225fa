"""``torch.Generator(device="xla")``: a source of seeds of its own, beside those of the devices.

Every random operator that gets it draws one seed from it when it is recorded. State, seed and their errors are
those of a generator of the CPU behind it. Operators of other devices refuse it, as they do PyTorch's.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch

from xla_core.execution import runtime
from xla_core.recording import random_state
from xla_core.torch_bridge import generator_device
from xla_core.torch_bridge.torch_private import GeneratorBase, make_generators_with

MSG_OTHER_DEVICE: Final = "Expected a 'xla' device type for generator but found '{device}'"

# By the address of the C++ generator: operators are called with another Python object for it.
_known: weakref.WeakValueDictionary[int, XLAGenerator] = weakref.WeakValueDictionary()


class XLAGenerator(GeneratorBase):  # type: ignore[misc, valid-type]
    """A generator of an ``xla`` device; ``torch.Generator(device="xla")`` makes one."""

    source: torch.Generator

    def __new__(cls, device: torch.device | str = "xla") -> XLAGenerator:
        """A generator with PyTorch's default seed. Raises IndexError when there is no such device."""
        generator = super().__new__(cls)
        generator.source = GeneratorBase()
        generator_device.set_device(generator, runtime.trace_of(torch.device(device)).device.index)
        _known[generator._cdata] = generator
        return generator

    def manual_seed(self, seed: int) -> XLAGenerator:
        """Start anew from ``seed``; the generator itself."""
        self.source.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Start anew from a seed that is taken from the system, and return it."""
        return self.source.seed()

    def initial_seed(self) -> int:
        """The seed that it started from."""
        return self.source.initial_seed()

    def get_state(self) -> torch.Tensor:
        """A CPU tensor of bytes with which ``set_state`` comes back to here."""
        return self.source.get_state()

    def set_state(self, state: torch.Tensor) -> XLAGenerator:
        """Go on as the generator did from which ``get_state`` got ``state``; the generator itself."""
        self.source.set_state(state)
        return self

    def clone_state(self) -> XLAGenerator:
        """Another generator in the state of this one."""
        return XLAGenerator(self.device).set_state(self.get_state())

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (str(self.device), self.get_state())


def _rebuild(device: str, state: torch.Tensor) -> XLAGenerator:
    return XLAGenerator(device).set_state(state)


def seed_from(generator: torch.Generator) -> int:
    """The next seed of a generator that an operator on an ``xla`` device got.

    Raises RuntimeError for a generator of another device, as other devices do.
    """
    known = _known.get(generator._cdata)
    if known is None:
        raise RuntimeError(MSG_OTHER_DEVICE.format(device=generator.device.type))
    return random_state.derived_seed(
        int(torch.empty((), dtype=torch.int64).random_(generator=known.source))
    )


def of_cpu(generator: torch.Generator) -> torch.Generator:
    """The generator that operators of the CPU can draw from: the one behind an ``xla`` one, or itself."""
    known = _known.get(generator._cdata)
    return generator if known is None else known.source


def install() -> None:
    """Let ``torch.Generator`` make generators of ``xla`` devices, too; once."""
    make_generators_with(XLAGenerator)
