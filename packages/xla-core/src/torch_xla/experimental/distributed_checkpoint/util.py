"""torch_xla.experimental.distributed_checkpoint.util: optimizers before a checkpoint (package xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "prime_optimizer": "xla_spmd.checkpoint.optimizer",
    },
)
