"""Counters and timed metrics of the process, under torch_xla's names, and the report that lists them."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Final

SAMPLES: Final = 1024  # torch_xla keeps the last 1024 samples of a metric for its percentiles
PERCENTILES: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)

_lock = threading.Lock()
_counters: dict[str, int] = {}
_collectors: list[Callable[[], dict[str, int]]] = []


class Metric:
    """Samples of one quantity: all are counted and summed, the last ``SAMPLES`` are kept."""

    __slots__ = ("name", "render", "total", "accumulator", "samples")

    def __init__(self, name: str, render: Callable[[float], str]) -> None:
        self.name = name
        self.render = render
        self.total = 0
        self.accumulator = 0.0
        self.samples: collections.deque[tuple[float, float]] = collections.deque(maxlen=SAMPLES)

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
    with _lock:
        _counters[name] = _counters.get(name, 0) + by


def sample(name: str, value: float, render: Callable[[float], str] = render_time) -> None:
    """Take one sample of a metric: nanoseconds, or what ``render`` prints."""
    with _lock:
        metric = _metrics.get(name)
        if metric is None:
            metric = _metrics[name] = Metric(name, render)
        metric.add(value)


def add_collector(collector: Callable[[], dict[str, int]]) -> None:
    """Add counters that are computed when somebody asks rather than counted as they happen."""
    _collectors.append(collector)


def all_counters() -> dict[str, int]:
    """Every counter above zero, sorted by name."""
    with _lock:
        merged = dict(_counters)
    for collector in _collectors:
        for name, value in collector().items():
            merged[name] = merged.get(name, 0) + value
    return {name: merged[name] for name in sorted(merged) if merged[name] > 0}


def all_metrics() -> dict[str, Metric]:
    """Every metric with a sample, sorted by name."""
    with _lock:
        return {name: _metrics[name] for name in sorted(_metrics)}


def clear() -> None:
    """Forget all counters and metrics."""
    with _lock:
        _counters.clear()
        _metrics.clear()


def report() -> str:
    """The metrics report in torch_xla's text format: metrics, then counters; empty if there are none."""
    blocks = [_metric_block(metric) for metric in all_metrics().values()]
    blocks += [f"Counter: {name}\n  Value: {value}\n" for name, value in all_counters().items()]
    return "".join(blocks)


def _metric_block(metric: Metric) -> str:
    samples = list(metric.samples)
    render = metric.render
    lines = [
        f"Metric: {metric.name}",
        f"  TotalSamples: {metric.total}",
        f"  Accumulator: {render(metric.accumulator)}",
    ]
    span = samples[-1][0] - samples[0][0]
    if span > 0:
        lines.append(f"  ValueRate: {render(sum(v for _, v in samples) / span)} / second")
        lines.append(f"  Rate: {len(samples) / span:g} / second")
    ordered = sorted(v for _, v in samples)
    percentiles = "; ".join(
        f"{p * 100:g}%={render(ordered[int(p * len(ordered))])}" for p in PERCENTILES
    )
    lines.append(f"  Percentiles: {percentiles}")
    return "\n".join(lines) + "\n"
