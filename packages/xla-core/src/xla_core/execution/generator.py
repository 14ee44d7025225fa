"""``torch.Generator(device="xla")``: a separate source of seeds, in addition to those of the devices.

Every random operator that is called with it draws one seed from it when it is recorded. Its state and seed, and
their errors, are those of a CPU generator that it wraps. Operators of other devices refuse it, like any generator
of another device.
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

# By the address of the C++ generator, because operators are called with a new Python object for it.
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
        """Restart from ``seed``; returns the generator itself."""
        self.source.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Restart from a seed of the operating system, and return that seed."""
        return self.source.seed()

    def initial_seed(self) -> int:
        """The seed that it started from."""
        return self.source.initial_seed()

    def get_state(self) -> torch.Tensor:
        """A CPU tensor of bytes with the state, for ``set_state``."""
        return self.source.get_state()

    def set_state(self, state: torch.Tensor) -> XLAGenerator:
        """Continue from ``state``, which ``get_state`` returned; returns the generator itself."""
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
    """The next seed from a generator that was passed to an operator on an ``xla`` device.

    Raises RuntimeError for a generator of another device, as other devices do.
    """
    known = _known.get(generator._cdata)
    if known is None:
        raise RuntimeError(MSG_OTHER_DEVICE.format(device=generator.device.type))
    return random_state.derived_seed(
        int(torch.empty((), dtype=torch.int64).random_(generator=known.source))
    )


def of_cpu(generator: torch.Generator) -> torch.Generator:
    """The generator that CPU operators can draw from: the one that an ``xla`` generator wraps, or itself."""
    known = _known.get(generator._cdata)
    return generator if known is None else known.source


def install() -> None:
    """Make ``torch.Generator`` also create generators of ``xla`` devices. Works once."""
    make_generators_with(XLAGenerator)
