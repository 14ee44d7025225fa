"""torch_xla.debug.metrics (met): counters and timed metrics, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "metrics_report": "xla_debug.metrics",
        "short_metrics_report": "xla_debug.metrics",
        "counter_names": "xla_debug.metrics",
        "counter_value": "xla_debug.metrics",
        "metric_names": "xla_debug.metrics",
        "metric_data": "xla_debug.metrics",
        "clear_counters": "xla_debug.metrics",
        "clear_metrics": "xla_debug.metrics",
        "clear_all": "xla_debug.metrics",
        "executed_fallback_ops": "xla_debug.metrics",
    },
)
