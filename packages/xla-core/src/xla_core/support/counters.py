"""Counters and timed metrics of the process, under torch_xla's names, and the report that lists them."""

from __future__ import annotations

import collections
import enum
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from xla_core.support import flags

__all__ = [
    "CREATED",
    "Cleared",
    "Follower",
    "Metric",
    "RUNTIME_NAMES",
    "SCALAR_READ",
    "Sample",
    "Standing",
    "Tally",
    "all_counters",
    "all_metrics",
    "before_looking",
    "clear",
    "clear_counters",
    "clear_metrics",
    "counter_text",
    "follow",
    "increment",
    "lock",
    "metric_text",
    "percentile_labels",
    "percentile_positions",
    "render_bytes",
    "render_number",
    "render_time",
    "report",
    "sample",
]


# torch_xla's report is two lists, its tracing layer's and then its runtime's; these are the latter.
RUNTIME_NAMES: Final = frozenset({
    "CompileTime", "ExecuteTime", "ExecuteReplicatedTime", "InboundData", "OutboundData",
    "TransferToDeviceTime", "TransferFromDeviceTime", "CreateCompileHandles", "CreateDataHandles",
    "MarkStep", "PersistentCacheHit", "EagerOpCompileTime", "EagerOpExecuteTime", "ExecuteComputation",
    "ExecuteReplicated",
})  # fmt: skip

CREATED: Final = "CreateXlaTensor"
"""Counts tensors: those that operators make, and those that come from the host."""

SCALAR_READ: Final = "aten::_local_scalar_dense"
"""Counts scalars that the program read: torch_xla lists it among the operators that ran on the CPU."""

lock: Final = threading.Lock()
"""Held while a counter or a metric changes."""

Follower: TypeAlias = Callable[[tuple[object, object]], None]
"""What ``follow`` calls with all that is counted, in order."""

_counters: dict[str, int] = {}
_tallies: list[Tally] = []
_followers: list[Follower] = []
_sources: list[Callable[[], None]] = []

# A process whose programs change all the time must not keep all they counted.
_MOST_TALLIES: Final = 4096

Sample = tuple[float, float]
"""When (unix time in seconds), and the value."""


class Metric:
    """Samples of one quantity: all are counted and summed, the last ``XLA_METRICS_SAMPLES`` are kept."""

    __slots__ = ("name", "render", "total", "accumulator", "samples")

    def __init__(self, name: str, render: Callable[[float], str]) -> None:
        self.name = name
        self.render = render
        self.total = 0
        self.accumulator = 0.0
        self.samples: collections.deque[Sample] = collections.deque(
            maxlen=flags.METRICS_SAMPLES.get()
        )


class Tally:
    """Counters that rise together (those of a program's operators), added up when counters are read.

    ``rows`` are names and by how much each rises with one ``count()``.
    """

    __slots__ = ("rows", "times")

    def __init__(self, rows: Iterable[tuple[str, int]]) -> None:
        self.rows = tuple(rows)
        self.times = 0

    def count(self) -> None:
        """Let all rise once."""
        with lock:
            if not self.times:
                if len(_tallies) == _MOST_TALLIES:
                    _add_up()
                _tallies.append(self)
            self.times += 1
            for follower in _followers:
                follower((self, 1))


def before_looking(source: Callable[[], None]) -> None:
    """Call ``source()`` before counters are read: it counts what it has not counted yet."""
    if source not in _sources:
        _sources.append(source)


def _ask_sources() -> None:
    for source in _sources:
        source()


class Cleared(enum.Enum):
    """What was forgotten, in the stream of ``follow``."""

    METRICS = enum.auto()
    COUNTERS = enum.auto()


class Standing(NamedTuple):
    """Counters and metrics as they were when ``follow`` was called."""

    counters: dict[str, int]
    metrics: list[tuple[Metric, int, float, list[Sample]]]


def follow(follower: Follower) -> tuple[Standing, Callable[[], None]]:
    """Call ``follower`` with everything that is counted from now on, in order.

    It gets ``(metric, sample)``, ``(counter name, by)``, ``(tally, 1)`` and ``(Cleared, None)``, with
    ``lock`` held: it must be quick and count nothing itself. Returns how things stand (of each metric
    its total, accumulator and kept samples), and a function that ends it.
    """
    _ask_sources()
    with lock:
        _add_up()
        metrics = [(m, m.total, m.accumulator, list(m.samples)) for m in _metrics.values()]
        _followers.append(follower)
        return Standing(dict(_counters), metrics), lambda: _unfollow(follower)


def _unfollow(follower: Follower) -> None:
    with lock:
        if follower in _followers:
            _followers.remove(follower)


_metrics: dict[str, Metric] = {}


def render_time(nanoseconds: float) -> str:
    """Nanoseconds the way torch_xla prints times: ``01m02s003ms004.005us``."""
    # reports of every step render hundreds: most are short, and sums of short ones are not long
    if nanoseconds < 1e6:
        return f"{nanoseconds / 1e3:07.3f}us"
    if nanoseconds < 1e9:
        whole = int(nanoseconds // 1e6)
        return f"{whole:03d}ms{(nanoseconds - whole * 1e6) / 1e3:07.3f}us"
    text = ""
    remaining = nanoseconds
    for unit, size in (("d", 86_400e9), ("h", 3_600e9), ("m", 60e9), ("s", 1e9)):
        if text or remaining >= size:
            whole = int(remaining // size)
            text += f"{whole:02d}{unit}"
            remaining -= whole * size
    whole = int(remaining // 1e6)
    return f"{text}{whole:03d}ms{(remaining - whole * 1e6) / 1e3:07.3f}us"


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
        for follower in _followers:
            follower((name, by))


def sample(name: str, value: float, render: Callable[[float], str] = render_time) -> None:
    """Take one sample of a metric: nanoseconds, or what ``render`` prints."""
    with lock:
        metric = _metrics.get(name)
        if metric is None:
            metric = _metrics[name] = Metric(name, render)
        point = time.time(), value
        # not a method of the metric: every transfer and launch takes samples, and a call costs as much as this
        metric.total += 1
        metric.accumulator += value
        metric.samples.append(point)
        for follower in _followers:
            follower((metric, point))


def _add_up() -> None:
    for tally in _tallies:
        for name, count in tally.rows:
            _counters[name] = _counters.get(name, 0) + count * tally.times
        tally.times = 0
    _tallies.clear()


def all_counters() -> dict[str, int]:
    """Every counter above zero, sorted by name."""
    _ask_sources()
    with lock:
        _add_up()
        return {name: _counters[name] for name in sorted(_counters) if _counters[name] > 0}


def all_metrics() -> dict[str, Metric]:
    """Every metric with a sample, sorted by name."""
    with lock:
        return {name: _metrics[name] for name in sorted(_metrics)}


def clear_counters() -> None:
    """Set all counters to zero."""
    _ask_sources()
    with lock:
        _add_up()
        _counters.clear()
        for follower in _followers:
            follower((Cleared.COUNTERS, None))


def clear_metrics() -> None:
    """Forget all metrics."""
    with lock:
        _metrics.clear()
        for follower in _followers:
            follower((Cleared.METRICS, None))


def clear() -> None:
    """Forget all counters and metrics."""
    clear_counters()
    clear_metrics()


def report(
    metric_names: Iterable[str] | None = None, counter_names: Iterable[str] | None = None
) -> str:
    """The metrics report in torch_xla's text format; empty if there is nothing to report.

    All by name come in two parts, the tracing layer's and the runtime's, each with its metrics and then its
    counters; those that are named come in the order given. Layout and units follow torch_xla 2.9.
    """
    metrics = all_metrics()
    counted = all_counters()
    chosen = [
        metrics[n] for n in (metrics if metric_names is None else metric_names) if n in metrics
    ]
    names = [n for n in (counted if counter_names is None else counter_names) if n in counted]
    blocks: list[str] = []
    layers = (False, True) if metric_names is None and counter_names is None else (None,)
    for runtime in layers:
        part = [m for m in chosen if runtime in (None, m.name in RUNTIME_NAMES)]
        blocks += map(_metric_block, part)
        counts = [n for n in names if runtime in (None, n in RUNTIME_NAMES)]
        blocks += [counter_text(n, counted[n]) for n in counts]
    return "".join(blocks)


def counter_text(name: str, value: int | str) -> str:
    """One counter's lines in the report."""
    return f"Counter: {name}\n  Value: {value}\n"


def _metric_block(metric: Metric) -> str:
    with lock:
        total, accumulator = metric.total, metric.accumulator
        samples = list(metric.samples)
    values = sorted(value for _, value in samples)
    kept_sum = sum(value for _, value in samples)
    span = samples[-1][0] - samples[0][0]
    shown = (metric.render(values[i]) for i in percentile_positions(len(values)))
    percentiles = "; ".join(map("{}={}".format, percentile_labels(), shown))
    return metric_text(metric, total, accumulator, len(values), kept_sum, span, percentiles)


def metric_text(
    metric: Metric,
    total: int,
    accumulator: float,
    kept: int,
    kept_sum: float,
    span: float,
    percentiles: str,
) -> str:
    """One metric's lines in the report.

    ``kept`` and ``kept_sum`` are number and sum of the samples kept, ``span`` the seconds between the
    first and the last of them, ``percentiles`` ``1%=...; 5%=...`` of their values.
    """
    render = metric.render
    rates = ""
    if span > 0:
        rates = (
            f"\n  ValueRate: {render(kept_sum / span)} / second\n  Rate: {kept / span:g} / second"
        )
    return (
        f"Metric: {metric.name}\n  TotalSamples: {total}\n  Accumulator: {render(accumulator)}{rates}\n"
        f"  Percentiles: {percentiles}\n"
    )


def percentile_positions(count: int) -> tuple[int, ...]:
    """Where the percentiles that reports show stand among ``count`` sorted samples."""
    return tuple(min(int(p * count), count - 1) for p in flags.METRICS_PERCENTILES.get())


def percentile_labels() -> tuple[str, ...]:
    """``1%``, ``5%``, ...: what stands before the values in the report's lines of percentiles."""
    return tuple(f"{p * 100:g}%" for p in flags.METRICS_PERCENTILES.get())
