"""The device that a program is being lowered for: rules may ask where devices differ.

Most rules do not: XLA makes of one operation what suits each device. Kernels written for one kind of
device do.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Final

from xla_core.contract.device_protocol import DeviceDescription


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A kind of device: jax's name of the platform, the hardware's name, cores of one device.

    ``partitions`` says over how many such devices the program's values may be split.
    """

    platform: str
    kind: str = ""
    cores: int = 1
    partitions: int = 1


def target_of(description: DeviceDescription) -> Target:
    """What a program for this device is lowered for."""
    cores = int(description.attributes.get("num_cores", 1))
    return Target(description.platform, description.kind, cores)


_current: Final[contextvars.ContextVar[Target | None]] = contextvars.ContextVar(
    "target", default=None
)


def current() -> Target | None:
    """The target inside ``lowering_for``; None elsewhere, where no device is known."""
    return _current.get()


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """Rules that run inside the block lower for ``target``."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
