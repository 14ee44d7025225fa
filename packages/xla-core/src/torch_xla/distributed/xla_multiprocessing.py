"""torch_xla.distributed.xla_multiprocessing (xmp): launches replicas as processes (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

_HELPERS = ("MpModelWrapper", "MpSerialExecutor", "create_optimized_replica_groups")
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "spawn": "xla_dist.processes.launching",
        **dict.fromkeys(_HELPERS, "xla_dist.processes.wrappers"),
    },
)
