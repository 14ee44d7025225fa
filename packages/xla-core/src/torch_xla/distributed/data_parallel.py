"""torch_xla.distributed.data_parallel (dp): data parallelism with one thread per device (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DataParallel": "xla_dist.data_parallel.thread_data_parallel",
        "Context": "xla_dist.data_parallel.thread_data_parallel",
        "ParallelLoader": "xla_dist.data_parallel.parallel_loader",
    },
)
