"""SPMD mode: the process shows all devices of the job as one, ``xla:0``."""

from __future__ import annotations

import os
import warnings
from typing import Final

from xla_core.extension_api import runtime
from xla_core.support import flags

MSG_LATE: Final = (
    "use_spmd() was called after tensors were created: those on xla:0 are copied to all devices when they are "
    "used next, and programs compiled so far are compiled again. Call it first"
)


class _Automatic:
    chosen = False


def use_spmd(auto: bool = False) -> None:
    """Show all devices of the job as the single device ``xla:0``, over which tensors can be split.

    Call it before the first tensor is created. A later call works, but warns: tensors on ``xla:0`` are copied to
    all devices when they are used next. With ``auto`` (default: False) or ``XLA_AUTO_SPMD=1``, xla-plan chooses
    how parameters, optimizer state and data are split, when the first training step runs. That step raises
    RuntimeError if no choice can be made.
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
    """Whether shardings of inputs that the user has not annotated are chosen automatically."""
    return _Automatic.chosen
