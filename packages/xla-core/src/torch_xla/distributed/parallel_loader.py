"""torch_xla.distributed.parallel_loader (pl): background upload of batches (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

_NAMES = ("MpDeviceLoader", "ParallelLoader", "PerDeviceLoader", "PerDeviceQueue")
__getattr__, __dir__ = lazy_names(
    __name__, dict.fromkeys(_NAMES, "xla_dist.data_parallel.parallel_loader")
)
