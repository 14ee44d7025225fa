"""torch_xla._internal.pjrt: runs replicas as processes or as threads (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

_NAMES = (
    "_SpawnFn",
    "_initialize_single_process",
    "_merge_replica_results",
    "_run_singleprocess",
    "_run_thread_per_device",
    "initialize_multiprocess",
    "initialize_singleprocess",
    "run_multiprocess",
    "spawn",
    "spawn_threads",
)
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(_NAMES, "xla_dist.processes.pjrt_names"))
