"""torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "XlaFullyShardedDataParallel": "xla_dist.fsdp.fully_sharded",
    },
)
