"""torch_xla.experimental.distributed_checkpoint.manager: checkpoints of a run (package xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CheckpointManager": "xla_spmd.checkpoint.manager",
    },
)
