"""Whether this process runs one program over all devices; the package xla-spmd does it."""

from __future__ import annotations

from xla_core.support import flags


class _Mode:
    on = False


def is_spmd() -> bool:
    """Whether all devices are shown as one, over which tensors can be split."""
    return _Mode.on or flags.USE_SPMD.get()


def enable() -> None:
    """Show all devices as one from the next time on that devices are attached."""
    _Mode.on = True
