"""torch_xla.experimental.resume: resumes interrupted runs (packages xla-dist and xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "PerProcess": "xla_spmd.checkpoint.run_state",
        "ResumableLoader": "xla_spmd.checkpoint.resumable_loader",
        "RunCheckpoints": "xla_spmd.checkpoint.run_checkpoints",
        "restart_count": "xla_dist.processes.restarts",
    },
)
