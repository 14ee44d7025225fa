"""The functions of torch_xla's C++ module ``_XLAC`` for checkpoints when a process is asked to end."""

from __future__ import annotations

from typing import Final

import torch.distributed as dist

from xla_spmd.checkpoint import preemption
from xla_spmd.checkpoint.preemption import unwatch as _deactivate_preemption_sync_manager
from xla_spmd.checkpoint.preemption import watch as _activate_preemption_sync_manager

MSG_NOT_ACTIVE: Final = (
    "_sync_point_reached needs the preemption sync manager: call _activate_preemption_sync_manager() first, in "
    "the main thread"
)


def _sync_point_reached(step: int) -> bool:
    """Whether ``step`` is the one to take a checkpoint at: a process of the job was asked to end.

    All processes call it at every step, counting alike, and get True at the same step: the next one through
    ``torch.distributed``'s default group where it is initialized, else the largest that any process has come to,
    through the job's coordination service. Raises RuntimeError unless SIGTERM is watched.
    """
    if not preemption.is_watching():
        raise RuntimeError(MSG_NOT_ACTIVE)
    if dist.is_initialized():
        return preemption.reached(dist.group.WORLD)
    return preemption.reached_in_job(step)


__all__ = [
    "_activate_preemption_sync_manager", "_deactivate_preemption_sync_manager", "_sync_point_reached",
]  # fmt: skip
