"""SPMD mode: the process shows all devices of the job as one, ``xla:0``."""

from __future__ import annotations

import os
import warnings
from typing import Final

from xla_core.extension_api import runtime
from xla_core.support import flags

MSG_LATE: Final = (
    "use_spmd() after tensors were made: those on xla:0 are copied to all devices when they are used "
    "next, programs compiled so far are compiled again. Call it first"
)


class _Automatic:
    chosen = False


def use_spmd(auto: bool = False) -> None:
    """Show all devices of the job as the one device ``xla:0``, over which tensors can be split.

    Call it before the first tensor; later it works too, warns, and tensors on ``xla:0`` come along. With ``auto``
    (default: False) the first training step decides how parameters, optimizer state and data are split, as
    ``xla-plan`` finds best; a RuntimeError is raised there where it cannot. ``XLA_AUTO_SPMD=1`` is the same.
    """
    if auto or flags.AUTO_SPMD.get():
        _Automatic.chosen = True
    if runtime.is_spmd():
        return
    runtime.enable_spmd()
    os.environ[flags.USE_SPMD.name] = "1"  # scripts and child processes read it
    if runtime.started():
        warnings.warn(MSG_LATE, stacklevel=2)
        runtime.reattach()


def is_automatic() -> bool:
    """Whether steps decide how their inputs are split, where the user has not said it."""
    return _Automatic.chosen
