"""torch_xla.experimental.resume: runs that go on where they were (packages xla-dist and xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "restart_count": "xla_dist.processes.restarts",
    },
)
