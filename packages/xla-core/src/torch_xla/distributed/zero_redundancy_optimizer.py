"""torch_xla.distributed.zero_redundancy_optimizer: optimizer state sharded over replicas (xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"ZeroRedundancyOptimizer": "xla_dist.data_parallel.zero_redundancy"}
)
