"""Counters and timed metrics of the process, under torch_xla's names, and the report that lists them."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from xla_core import flags


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(sorted(float(part) for part in text.split(":")))


SAMPLES: Final = flags.Flag(
    "XLA_METRICS_SAMPLES", int, 1024, "samples that each metric keeps for its percentiles"
)
PERCENTILES: Final[flags.Flag[tuple[float, ...]]] = flags.Flag(
    "XLA_METRICS_PERCENTILES",
    _fractions,
    (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99),
    "the percentiles that reports show, as fractions: 0.5:0.9",
)
# torch_xla's report is two lists, its tracing layer's and then its runtime's; these are the latter.
RUNTIME_NAMES: Final = frozenset({
    "CompileTime", "ExecuteTime", "ExecuteReplicatedTime", "InboundData", "OutboundData",
    "TransferToDeviceTime", "TransferFromDeviceTime", "CreateCompileHandles", "CreateDataHandles",
    "MarkStep", "PersistentCacheHit",
})  # fmt: skip

lock: Final = threading.Lock()
"""Held while a counter or a metric changes."""

_counters: dict[str, int] = {}
_collectors: list[Callable[[], dict[str, int]]] = []
# What the collectors said when the counters were cleared last.
_cleared: dict[str, int] = {}


class Metric:
    """Samples of one quantity: all are counted and summed, the last ``SAMPLES`` are kept."""

    __slots__ = ("name", "render", "total", "accumulator", "samples")

    def __init__(self, name: str, render: Callable[[float], str]) -> None:
        self.name = name
        self.render = render
        self.total = 0
        self.accumulator = 0.0
        self.samples: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=SAMPLES.get()
        )

    def add(self, value: float) -> None:
        """Take one sample."""
        self.total += 1
        self.accumulator += value
        self.samples.append((time.time(), value))


_metrics: dict[str, Metric] = {}


def render_time(nanoseconds: float) -> str:
    """Nanoseconds the way torch_xla prints times: ``01m02s003ms004.005us``."""
    remaining = nanoseconds
    text = ""
    if remaining < 1e6:  # most are: reports of every step render hundreds
        return f"{remaining / 1e3:07.3f}us"
    for unit, size in (("d", 86_400e9), ("h", 3_600e9), ("m", 60e9), ("s", 1e9)):
        if text or remaining >= size:
            whole = int(remaining // size)
            text += f"{whole:02d}{unit}"
            remaining -= whole * size
    if text or remaining >= 1e6:
        whole = int(remaining // 1e6)
        text += f"{whole:03d}ms"
        remaining -= whole * 1e6
    return f"{text}{remaining / 1e3:07.3f}us"


def render_bytes(value: float) -> str:
    """Bytes with two decimals in steps of 1024."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 1024:
            return f"{value:.2f}{unit}"
        value /= 1024
    return f"{value:.2f}PB"


def render_number(value: float) -> str:
    """A plain number with two decimals."""
    return f"{value:.2f}"


def increment(name: str, by: int = 1) -> None:
    """Add to a counter, which exists from its first increment on."""
    with lock:
        _counters[name] = _counters.get(name, 0) + by


def sample(name: str, value: float, render: Callable[[float], str] = render_time) -> None:
    """Take one sample of a metric: nanoseconds, or what ``render`` prints."""
    with lock:
        metric = _metrics.get(name)
        if metric is None:
            metric = _metrics[name] = Metric(name, render)
        metric.add(value)


def add_collector(collector: Callable[[], dict[str, int]]) -> None:
    """Add counters that are computed when somebody asks rather than counted as they happen."""
    _collectors.append(collector)


def _collected(into: dict[str, int]) -> dict[str, int]:
    # plain dicts: with XLA_METRICS_FILE this runs at every step, and collections.Counter adds in Python
    for collector in _collectors:
        for name, value in collector().items():
            into[name] = into.get(name, 0) + value
    return into


def all_counters() -> dict[str, int]:
    """Every counter above zero, sorted by name."""
    with lock:
        merged = dict(_counters)
        cleared = dict(_cleared)
    _collected(merged)
    for name, value in cleared.items():
        merged[name] = merged.get(name, 0) - value
    return {name: merged[name] for name in sorted(merged) if merged[name] > 0}


def all_metrics() -> dict[str, Metric]:
    """Every metric with a sample, sorted by name."""
    with lock:
        return {name: _metrics[name] for name in sorted(_metrics)}


def clear_counters() -> None:
    """Set all counters to zero."""
    collected = _collected({})
    with lock:
        _counters.clear()
        _cleared.clear()
        _cleared.update(collected)


def clear_metrics() -> None:
    """Forget all metrics."""
    with lock:
        _metrics.clear()


def clear() -> None:
    """Forget all counters and metrics."""
    clear_counters()
    clear_metrics()


def report(
    metric_names: Iterable[str] | None = None, counter_names: Iterable[str] | None = None
) -> str:
    """The metrics report in torch_xla's text format; empty if there is nothing to report.

    Two parts, the tracing layer's and the runtime's, each with its metrics and then its counters: all
    of them by name, or those named in the order given. Layout and units follow torch_xla 2.9.
    """
    metrics = all_metrics()
    counted = all_counters()
    chosen = [
        metrics[n] for n in (metrics if metric_names is None else metric_names) if n in metrics
    ]
    names = [n for n in (counted if counter_names is None else counter_names) if n in counted]
    blocks = []
    for runtime in (False, True):
        blocks += [_metric_block(m) for m in chosen if (m.name in RUNTIME_NAMES) == runtime]
        blocks += [counter_text(n, counted[n]) for n in names if (n in RUNTIME_NAMES) == runtime]
    return "".join(blocks)


def counter_text(name: str, value: int) -> str:
    """One counter's lines in the report."""
    return f"Counter: {name}\n  Value: {value}\n"


def _metric_block(metric: Metric) -> str:
    with lock:
        total, accumulator = metric.total, metric.accumulator
        samples = list(metric.samples)
    values = [value for _, value in samples]
    span = samples[-1][0] - samples[0][0]
    return metric_text(
        metric.name, metric.render, total, accumulator, sum(values), span, sorted(values)
    )


def metric_text(
    name: str,
    render: Callable[[float], str],
    total: int,
    accumulator: float,
    kept_sum: float,
    span: float,
    ordered: Sequence[float],
) -> str:
    """One metric's lines in the report.

    ``kept_sum`` is the sum of the samples kept, ``span`` the seconds between the first and the last of
    them, ``ordered`` their values from small to large.
    """
    count = len(ordered)
    lines = [f"Metric: {name}", f"  TotalSamples: {total}", f"  Accumulator: {render(accumulator)}"]
    if span > 0:
        lines.append(f"  ValueRate: {render(kept_sum / span)} / second")
        lines.append(f"  Rate: {count / span:g} / second")
    values = (render(ordered[min(int(p * count), count - 1)]) for p in PERCENTILES.get())
    percentiles = "; ".join(map("{}={}".format, percentile_labels(), values))
    lines.append(f"  Percentiles: {percentiles}")
    return "\n".join(lines) + "\n"


def percentile_labels() -> tuple[str, ...]:
    """``1%``, ``5%``, ...: what stands before the values in the report's lines of percentiles."""
    return tuple(f"{p * 100:g}%" for p in PERCENTILES.get())
