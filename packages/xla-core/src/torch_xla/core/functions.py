"""torch_xla.core.functions: differentiable collectives (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

_NAMES = (
    "AllGather", "AllReduce", "AllReduceSumLayer", "SyncBatchNorm", "all_gather", "all_reduce",
    "distributed_mm",
)  # fmt: skip
__getattr__, __dir__ = lazy_names(
    __name__, dict.fromkeys(_NAMES, "xla_dist.collectives.autograd_functions")
)
