"""torch_xla.debug.metrics_compare_utils: parses and compares metrics reports, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "parse_metrics_report": "xla_debug.metrics_compare",
        "get_data_points_from_metrics_reports": "xla_debug.metrics_compare",
        "compare_metrics": "xla_debug.metrics_compare",
    },
)
