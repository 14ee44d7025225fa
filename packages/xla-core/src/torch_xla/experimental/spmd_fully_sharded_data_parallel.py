"""torch_xla.experimental.spmd_fully_sharded_data_parallel: from the package xla-spmd."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "SpmdFullyShardedDataParallel": "xla_spmd.training.fully_sharded",
        "recursive_wrap": "xla_dist.fsdp.wrap",
    },
)
