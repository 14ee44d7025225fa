"""torch_xla.debug.metrics_saver: saves metrics reports to a file, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "save_metrics": "xla_debug.live.metrics_file",
    },
)
