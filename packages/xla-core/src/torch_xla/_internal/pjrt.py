"""torch_xla._internal.pjrt: replicas as processes and as threads (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

_NAMES = ("run_multiprocess", "spawn", "spawn_threads", "initialize_multiprocess")
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(_NAMES, "xla_dist.processes.pjrt_names"))
