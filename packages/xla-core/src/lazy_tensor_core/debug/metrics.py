"""lazy_tensor_core.debug.metrics: counters and timed metrics as text."""

from __future__ import annotations

from xla_core.support.counters import report as metrics_report
