"""``torch_xla.debug.metrics``: counters and timed metrics of the process.

xla-core counts and formats them (``xla_core.support.counters``), with the names and in the format of torch_xla 2.9.
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
    """All metrics and counters as text; empty if nothing was recorded."""
    return counters.report()


def short_metrics_report(
    counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None
) -> str:
    """The report of the counters ``counter_names`` and the metrics ``metric_names``, in this order.

    By default these are ``SHORT_COUNTERS`` and the operators that ran on the CPU, and ``SHORT_METRICS``: the ones
    to look at first. Names without a value are left out.
    """
    chosen = counter_names or (*SHORT_COUNTERS, *executed_fallback_ops())
    return counters.report(metric_names or SHORT_METRICS, chosen)


def counter_names() -> list[str]:
    """The names of the counters above zero, sorted."""
    return list(counters.all_counters())


def counter_value(name: str) -> int | None:
    """The value of the counter ``name``, or None if there is no such counter above zero."""
    return counters.all_counters().get(name)


def metric_names() -> list[str]:
    """The names of the metrics with at least one sample, sorted."""
    return list(counters.all_metrics())


def metric_data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """The metric ``name``: ``(number of samples, their sum, ((unix time in seconds, value), ...))``, or None.

    Values are nanoseconds or bytes. Only the last ``XLA_METRICS_SAMPLES`` (1024) samples are kept and listed;
    number and sum count all samples. Returns None if there is no such metric.
    """
    metric = counters.all_metrics().get(name)
    if metric is None:
        return None
    with counters.lock:
        return metric.total, metric.accumulator, tuple(metric.samples)


def clear_all() -> None:
    """Reset all counters and metrics."""
    counters.clear()


def executed_fallback_ops() -> list[str]:
    """The operators that ran on the CPU since the counters were cleared, as ``aten::name``.

    As in torch_xla, ``aten::_local_scalar_dense`` is among them if the script has read a scalar.
    """
    return [name for name in counters.all_counters() if name.startswith("aten::")]


def counter_increment(name: str, by: int = 1) -> None:
    """Add ``by`` (default: 1) to the counter ``name``, which is created if there is none."""
    counters.increment(name, by)
