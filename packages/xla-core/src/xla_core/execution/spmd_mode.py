"""Whether this process runs one program over all devices; the package xla-spmd does it."""

from __future__ import annotations

from typing import Final

from xla_core.support import flags

USE_SPMD: Final = flags.Flag(
    "XLA_USE_SPMD", flags.parse_bool, False, "as xr.use_spmd() at the start of the script"
)


class _Mode:
    on = False


def is_spmd() -> bool:
    """Whether all devices are shown as one, over which tensors can be split."""
    return _Mode.on or USE_SPMD.get()


def enable() -> None:
    """Show all devices as one from the next time on that devices are attached."""
    _Mode.on = True
