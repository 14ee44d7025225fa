"""``torch_xla.debug.metrics``: counters and timed metrics of the process.

What is counted and the text format are xla-core's (``xla_core.support.counters``), after torch_xla 2.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xla_core.support import counters
from xla_core.support.counters import clear_counters as clear_counters
from xla_core.support.counters import clear_metrics as clear_metrics

SHORT_COUNTERS: Final = ("CachedCompile", "MarkStep", "DynamoSyncInputExecuteTime")
SHORT_METRICS: Final = (
    "CompileTime",
    "ExecuteTime",
    "ExecuteReplicatedTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
)


def metrics_report() -> str:
    """Every metric and counter as text; empty when nothing was recorded."""
    return counters.report()


def short_metrics_report(
    counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None
) -> str:
    """The report of these counters and metrics, in the order given.

    Default: ``SHORT_COUNTERS`` and ``SHORT_METRICS``, the ones to look at first, and the operators that ran
    on the CPU. Names that have recorded nothing are left out.
    """
    chosen = counter_names or (*SHORT_COUNTERS, *executed_fallback_ops())
    return counters.report(metric_names or SHORT_METRICS, chosen)


def counter_names() -> list[str]:
    """Names of the counters above zero, sorted."""
    return list(counters.all_counters())


def counter_value(name: str) -> int | None:
    """The value of a counter; None if there is none of this name."""
    return counters.all_counters().get(name)


def metric_names() -> list[str]:
    """Names of the metrics with at least one sample, sorted."""
    return list(counters.all_metrics())


def metric_data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """``(total samples, sum of all samples, ((unix time in seconds, value), ...))`` or None.

    Times are in nanoseconds, sizes in bytes. The last ``XLA_METRICS_SAMPLES`` (1024) samples are kept.
    """
    metric = counters.all_metrics().get(name)
    if metric is None:
        return None
    with counters.lock:
        return metric.total, metric.accumulator, tuple(metric.samples)


def clear_all() -> None:
    """Forget all counters and metrics."""
    counters.clear()


def executed_fallback_ops() -> list[str]:
    """The operators that ran on the CPU since the counters were cleared: ``aten::name``.

    ``aten::_local_scalar_dense`` is among them where the program has read a scalar, as with torch_xla.
    """
    return [name for name in counters.all_counters() if name.startswith("aten::")]


def counter_increment(name: str, by: int = 1) -> None:
    """Add to a counter of one's own."""
    counters.increment(name, by)
