"""SPMD mode: the process shows all devices of the job as one, ``xla:0``."""

from __future__ import annotations

import os
import warnings
from typing import Final

from xla_core.extension_api import runtime
from xla_core.support import flags

MSG_AUTO: Final = (
    "auto-sharding is not available: the compiler of {device} devices leaves out XLA's "
    "auto-sharding pass. Call xr.use_spmd() and annotate what is large with mark_sharding(); XLA "
    "propagates from there"
)
MSG_LATE: Final = (
    "use_spmd() after tensors were made: those on xla:0 are copied to all devices when they are used "
    "next, programs compiled so far are compiled again. Call it first"
)


def use_spmd(auto: bool = False) -> None:
    """Show all devices of the job as the one device ``xla:0``, over which tensors can be split.

    Call it before the first tensor; later it works too, warns, and tensors on ``xla:0`` come along.
    Raises RuntimeError with ``auto`` where the device's compiler cannot choose shardings itself.
    """
    if auto or flags.AUTO_SPMD.get():
        raise RuntimeError(MSG_AUTO.format(device=runtime.device_type()))
    if runtime.is_spmd():
        return
    runtime.enable_spmd()
    os.environ[flags.USE_SPMD.name] = "1"  # scripts and child processes read it
    if runtime.started():
        warnings.warn(MSG_LATE, stacklevel=2)
        runtime.reattach()
