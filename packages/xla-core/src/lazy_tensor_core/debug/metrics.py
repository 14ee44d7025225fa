"""lazy_tensor_core.debug.metrics: what ran, as text."""

from __future__ import annotations

from xla_core.support.counters import report as metrics_report
