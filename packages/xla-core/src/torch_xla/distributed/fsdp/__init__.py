"""torch_xla.distributed.fsdp: parameters sharded over the replicas (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "XlaFullyShardedDataParallel": "xla_dist.fsdp.fully_sharded",
        "consolidate_sharded_state_dicts": "xla_dist.fsdp.consolidate",
        "consolidate_sharded_model_checkpoints": "xla_dist.fsdp.consolidate",
        "checkpoint_module": "xla_dist.fsdp.checkpointed",
    },
)
