"""torch_xla.experimental.distributed_checkpoint: from the package xla-spmd."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CheckpointManager": "xla_spmd.checkpoint.manager",
        "SPMDLoadPlanner": "xla_spmd.checkpoint.planners",
        "SPMDSavePlanner": "xla_spmd.checkpoint.planners",
        "prime_optimizer": "xla_spmd.checkpoint.optimizer",
    },
)
