"""``XLA_METRICS_FILE``: the metrics report of every step, appended to a file.

A full report sorts every metric's samples; doing that per step would cost as much as a small step.
So what changed since the last step is kept up to date: samples in order, sums, rendered numbers.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import sys
import time
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any, Final, TextIO

from xla_core import counters, model_api, runtime
from xla_debug import settings

FLUSH_SECONDS: Final = 0.2
"""A record is handed to the system with the first one that comes this much later, and at exit."""


_Taken = tuple[list[float], int, float, int, float]
"""New samples (the newest first), how many are kept, the seconds they span, total, accumulator."""


class _View:
    """One metric as reported last: its kept samples in order of time and in order of size."""

    def __init__(self, metric: counters.Metric) -> None:
        self.metric = metric
        self.total = 0
        self.kept: collections.deque[float] = collections.deque()
        self.ordered: list[float] = []
        self.sum = 0.0
        self.fractions = counters.PERCENTILES.get()
        self.labels = counters.percentile_labels()
        self.shown: list[float | None] = [None] * len(self.labels)
        self.percentiles = [""] * len(self.labels)
        self.text = ""

    def taken(self) -> _Taken | None:
        """What was added since the last call; None if nothing was."""
        metric = self.metric
        if metric.total == self.total:
            return None
        with counters.lock:
            added = metric.total - self.total
            samples = metric.samples
            fresh = [v for _, v in itertools.islice(reversed(samples), min(added, len(samples)))]
            count, span = len(samples), samples[-1][0] - samples[0][0]
            self.total = metric.total
            return fresh, count, span, metric.total, metric.accumulator

    def advance(self, taken: _Taken) -> None:
        """Bring the metric's lines in the report to the state that ``taken`` found."""
        fresh, count, span, total, accumulator = taken
        for value in reversed(fresh):
            self.kept.append(value)
            insort(self.ordered, value)
            self.sum += value
        while len(self.kept) > count:
            oldest = self.kept.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.sum -= oldest
        self.text = self._text(total, accumulator, count, span)

    def _text(self, total: int, accumulator: float, count: int, span: float) -> str:
        """``counters.metric_text``; most percentiles are those of the step before."""
        render, ordered = self.metric.render, self.ordered
        for i, fraction in enumerate(self.fractions):
            value = ordered[min(int(fraction * count), count - 1)]
            if value != self.shown[i]:
                self.shown[i] = value
                self.percentiles[i] = f"{self.labels[i]}={render(value)}"
        rates = (
            f"\n  ValueRate: {render(self.sum / span)} / second\n  Rate: {count / span:g} / second"
            if span > 0
            else ""
        )
        return (
            f"Metric: {self.metric.name}\n  TotalSamples: {total}\n"
            f"  Accumulator: {render(accumulator)}{rates}\n"
            f"  Percentiles: {'; '.join(self.percentiles)}\n"
        )


class MetricsFile:
    """Appends ``[MetricsData; step=N]`` and the report to ``stream``, once per call.

    What a step added is noted when it ends; the text of steps that take less than ``FLUSH_SECONDS`` is made
    and written for several of them at once, which costs half as much.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.step = 0
        self._views: dict[str, _View] = {}
        self._counters: dict[str, tuple[int, str]] = {}
        self._waiting: list[tuple[int, _State]] = []
        self._flushed = 0.0

    def write(self, _details: dict[str, Any] | None = None) -> None:
        """One record, for the step that has just ended."""
        self.step += 1
        self._waiting.append((self.step, self._state()))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the records that wait."""
        waiting, self._waiting = self._waiting, []
        for step, state in waiting:
            self.stream.write(f"[MetricsData; step={step}]\n{self._text(state)}\n")
        self.stream.flush()
        self._flushed = time.monotonic()

    def report(self) -> str:
        """The same text as ``xla_core.counters.report()``."""
        self.flush()
        return self._text(self._state())

    def _state(self) -> _State:
        views = []
        for name, metric in counters.all_metrics().items():
            view = self._views.get(name)
            if view is None or view.metric is not metric:
                view = self._views[name] = _View(metric)
            views.append((view, view.taken()))
        return views, counters.all_counters()

    def _text(self, state: _State) -> str:
        views, counted = state
        first: list[str] = []
        second: list[str] = []
        for view, taken in views:
            if taken is not None:
                view.advance(taken)
            name = view.metric.name
            (second if name in counters.RUNTIME_NAMES else first).append(view.text)
        known = self._counters
        for name, value in counted.items():
            row = known.get(name)
            if row is None or row[0] != value:
                row = known[name] = (value, counters.counter_text(name, value))
            (second if name in counters.RUNTIME_NAMES else first).append(row[1])
        return "".join(first) + "".join(second)


_State = tuple[list[tuple[_View, _Taken | None]], dict[str, int]]
"""What a report shows: the metrics with what was added to them, the counters."""


def path_of_process(path: str) -> Path:
    """The file of this process: with several, its ordinal is appended to the name."""
    if model_api.world_size() > 1:
        return Path(f"{path}.{model_api.global_ordinal()}")
    return Path(path)


def opened(path: str) -> TextIO:
    """The stream for ``path``: a file to append to, or ``STDERR`` or ``STDOUT``."""
    special = {"STDERR": sys.stderr, "STDOUT": sys.stdout}
    if path in special:
        return special[path]
    return path_of_process(path).open("a")


class _OfEnvironment:
    file: MetricsFile | None = None


def on_step(_details: dict[str, Any]) -> None:
    """A step ended: write its record to the file that the environment names."""
    if _OfEnvironment.file is None:
        if not runtime.started():
            return
        _OfEnvironment.file = MetricsFile(opened(settings.METRICS_FILE.get()))
        atexit.register(_OfEnvironment.file.flush)
    _OfEnvironment.file.write()


def save_metrics(metrics_file: str | None = None) -> None:
    """Append the metrics report to ``metrics_file`` (default: the one ``XLA_METRICS_FILE`` names).

    Does nothing when there is neither.
    """
    path = metrics_file or settings.METRICS_FILE.get()
    if not path:
        return
    if path in ("STDERR", "STDOUT"):
        opened(path).write(f"{counters.report()}\n")
        return
    with path_of_process(path).open("a") as stream:
        stream.write(f"{counters.report()}\n")
