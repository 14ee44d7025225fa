"""Whether this process runs one program over all devices (implemented by the package xla-spmd)."""

from __future__ import annotations

from xla_core.support import flags


class _Mode:
    on = False


def is_spmd() -> bool:
    """Whether all devices are shown as one, over which tensors can be split."""
    return _Mode.on or flags.USE_SPMD.get()


def enable() -> None:
    """Show all devices as one when devices are attached the next time."""
    _Mode.on = True
