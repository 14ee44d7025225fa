"""torch_xla.distributed.spmd.debugging: pictures of shardings, and what a sharded program costs."""

from __future__ import annotations

from torch_xla._packages import JAX_HELPERS, lazy_names
from torch_xla.distributed.spmd import HOMES

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        **HOMES,
        **JAX_HELPERS,
        "RICH_ENABLED": "xla_spmd.reports.visualize",
        "visualize_sharding": "xla_spmd.reports.visualize",
        "visualize_tensor_sharding": "xla_spmd.reports.visualize",
        "automatic_sharding": "xla_spmd.reports.automatic_report",
        "bytes_per_device": "xla_spmd.reports.program_report",
        "collectives": "xla_spmd.reports.program_report",
        "live_tensors": "xla_spmd.reports.program_report",
        "sharding_report": "xla_spmd.reports.program_report",
    },
)
