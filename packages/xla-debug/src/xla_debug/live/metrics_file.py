"""``XLA_METRICS_FILE``: appends the metrics report of every step to a file.

A full report sorts the samples of every metric. For each step, this would take as long as a small step. Therefore a
step only puts what it counted into a queue. Every fifth of a second, a thread writes the records of all steps since
then. Each record is derived from the one before: samples stay sorted, and sums and texts are kept.
"""

from __future__ import annotations

import atexit
import collections
import functools
import operator
import sys
import threading
import time
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TextIO

from xla_core.contract import events
from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api import runtime
from xla_core.support import counters
from xla_debug import settings

FLUSH_SECONDS: Final = 0.2
"""Records are written this number of seconds after the first one that waits, and at exit."""
MOST_WAITING: Final = 20_000
"""If this number of samples, increments and steps wait, their records are written at once."""
RENDERED: Final = 4096
"""The number of values per metric whose texts are kept: percentiles often return to earlier samples."""
MOST_TALLIES: Final = 1024
"""The most tallies, of programs and recorded steps, that are known to have all their counters in the report."""
STANDARD_STREAMS: Final = ("STDERR", "STDOUT")
MSG_UNWRITABLE: Final = (
    "XLA_METRICS_FILE: cannot write to {}: {}. No further steps are recorded. Make room, or name "
    "another file"
)


def _items_at(positions: tuple[int, ...]) -> Callable[[list[float]], tuple[float, ...]]:
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda ordered: tuple(ordered[i] for i in positions)


class _View:
    """The state of one metric in the last record: its kept samples in order of time and of size."""

    def __init__(
        self,
        metric: counters.Metric,
        total: int = 0,
        accumulator: float = 0.0,
        kept: Iterable[counters.Sample] = (),
    ) -> None:
        self.metric = metric
        self._total = total
        self._accumulator = accumulator
        self._kept = collections.deque(kept)
        self._most = metric.samples.maxlen or 0
        self._ordered = sorted(value for _, value in self._kept)
        self._sum = sum(value for _, value in self._kept)
        self._count = 0
        self._at_positions: Callable[[list[float]], tuple[float, ...]] = tuple
        self._shown: tuple[float, ...] = ()
        self._percentiles = ""
        self._form = "; ".join(f"{label}%=%s" for label in counters.percentile_labels())
        self._render = functools.lru_cache(RENDERED)(metric.render)
        self._text = ""

    def add(self, sample: counters.Sample) -> None:
        """Add a sample, in the same way as ``counters.Metric`` does."""
        value = sample[1]
        self._text = ""
        self._total += 1
        self._accumulator += value
        self._sum += value
        self._kept.append(sample)
        if len(self._kept) > self._most:
            oldest = self._kept.popleft()[1]
            self._sum -= oldest
            if oldest == value:
                return
            del self._ordered[bisect_left(self._ordered, oldest)]
        insort(self._ordered, value)

    def text(self) -> str:
        """The metric's lines in the report."""
        if self._text:
            return self._text
        kept = self._kept
        if len(kept) != self._count:
            self._count = len(kept)
            self._at_positions = _items_at(counters.percentile_positions(self._count))
        shown = self._at_positions(self._ordered)
        if shown != self._shown:
            self._shown = shown
            self._percentiles = self._form % tuple(map(self._render, shown))
        self._text = counters.metric_text(
            self.metric, self._total, self._accumulator, self._count, self._sum,
            kept[-1][0] - kept[0][0], self._percentiles,
        )  # fmt: skip
        return self._text


class _CounterLines:
    """The report's lines of counters. In nearly every step, the same counters are above zero as before."""

    def __init__(self, values: dict[str, int]) -> None:
        self._values = values
        # whether _names and _forms are those of the counters that are above zero now
        self._prepared = False
        # tallies all of whose counters are in _names
        self._tallies: set[counters.Tally] = set()
        self._names: tuple[list[str], list[str]] = ([], [])
        self._forms = ("", "")

    def add(self, name: str, by: int) -> None:
        """Increment one counter."""
        before = self._values.get(name, 0)
        self._values[name] = before + by
        if before <= 0 or by < 0:
            self._prepared = False

    def add_tally(self, tally: counters.Tally) -> None:
        """Increment the counters of a tally."""
        if tally in self._tallies:
            values = self._values
            for name, by in tally.rows:
                values[name] += by
            return
        for name, by in tally.rows:
            self.add(name, by)
        if len(self._tallies) == MOST_TALLIES:  # most belong to steps that never come again
            self._tallies.clear()
        self._tallies.add(tally)

    def text(self) -> tuple[str, str]:
        """The lines of the first and of the second part of the report."""
        if not self._prepared:
            self._prepare()
        first, second = (tuple(map(self._values.__getitem__, names)) for names in self._names)
        return self._forms[0] % first, self._forms[1] % second

    def _prepare(self) -> None:
        """Make the format strings of the counters that are above zero."""
        self._prepared = True
        self._tallies.clear()
        self._names = ([], [])
        for name in sorted(name for name, value in self._values.items() if value > 0):
            self._names[name in counters.RUNTIME_NAMES].append(name)
        first, second = (
            "".join(counters.counter_text(name.replace("%", "%%"), "%d") for name in names)
            for names in self._names
        )
        self._forms = first, second


class _Report:
    """The metrics report, kept up to date from the stream of ``counters.follow``."""

    def __init__(self, standing: counters.Standing) -> None:
        self._counters = _CounterLines(standing.counters)
        self._views = {one[0]: _View(*one) for one in standing.metrics}
        self._parts: tuple[list[_View], list[_View]] = ([], [])
        self._order()

    def take(self, what: ForeignObject, detail: ForeignObject) -> None:
        """Take an item of the stream: a metric and its sample, a counter and its increment, a tally, or a reset."""
        kind = type(what)
        if kind is counters.Metric:
            view = self._views.get(what)
            if view is None:
                view = self._views[what] = _View(what)
                self._order()
            view.add(detail)
        elif kind is str:
            self._counters.add(what, detail)
        elif kind is counters.Tally:
            self._counters.add_tally(what)
        elif what is counters.Cleared.METRICS:
            self._views.clear()
            self._order()
        else:
            self._counters = _CounterLines({})

    def _order(self) -> None:
        self._parts = ([], [])
        for view in sorted(self._views.values(), key=lambda view: view.metric.name):
            self._parts[view.metric.name in counters.RUNTIME_NAMES].append(view)

    def text(self) -> str:
        """The same text as ``counters.report()``."""
        before, after = ([view.text() for view in views] for views in self._parts)
        first, second = self._counters.text()
        return "".join((*before, first, *after, second))


class MetricsFile:
    """Appends ``[MetricsData; step=N]`` and the metrics report to ``stream`` for each call of ``write``.

    Records wait in memory until ``flush``, or, after ``write_behind``, for at most ``FLUSH_SECONDS``. They are lost
    if the process is killed in the meantime. If the stream cannot be written to any more, it gives up with a
    warning.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.step = 0
        self._waiting: collections.deque[tuple[object, object]] = collections.deque()
        standing, self._unfollow = counters.follow(self._waiting.append)
        self._report = _Report(standing)
        self._writing = threading.Lock()
        self._due = threading.Event()
        self._closed = False

    def write(self) -> None:
        """Add a record for the step that has just ended. Does nothing after ``close``."""
        if self._closed:
            return
        self.step += 1
        self._waiting.append((None, self.step))
        if len(self._waiting) >= MOST_WAITING:
            self.flush()
        elif not self._due.is_set():
            self._due.set()

    def write_behind(self) -> None:
        """Start a thread that writes waiting records, until ``close``."""
        threading.Thread(target=self._write_behind, name="xla-metrics-file", daemon=True).start()

    def _write_behind(self) -> None:
        while self._due.wait() and not self._closed:
            time.sleep(FLUSH_SECONDS)
            self._due.clear()
            self.flush()

    def flush(self) -> None:
        """Write the waiting records."""
        records = []
        with self._writing:
            take, next_item = self._report.take, self._waiting.popleft
            for _ in range(len(self._waiting)):
                what, detail = next_item()
                if what is None:
                    records.append(f"[MetricsData; step={detail}]\n{self._report.text()}\n")
                else:
                    take(what, detail)
            if records and not self._closed:
                self._append("".join(records))

    def _append(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            self._stop()
            _warn_unwritable(getattr(self.stream, "name", self.stream), error)

    def report(self) -> str:
        """The same text as ``xla_core.support.counters.report()``."""
        self.flush()
        with self._writing:
            return self._report.text()

    def close(self) -> None:
        """Write the waiting records, and stop following the counters. The stream stays open."""
        self.flush()
        self._stop()

    def _stop(self) -> None:
        self._unfollow()
        self._closed = True
        self._due.set()


def path_of_process(path: str) -> Path:
    """The file of this process: in a job of several, its ordinal is appended to ``path``."""
    if runtime.world_size() > 1:
        return Path(f"{path}.{runtime.global_ordinal()}")
    return Path(path)


def opened(path: str) -> TextIO:
    """The stream for ``path``: a file that is appended to, or a standard stream for ``STDERR`` or ``STDOUT``."""
    if path in STANDARD_STREAMS:
        return getattr(sys, path.lower())
    return path_of_process(path).open("a")


def _warn_unwritable(path: object, error: OSError) -> None:
    warnings.warn(MSG_UNWRITABLE.format(path, error), stacklevel=2)


class _OfEnvironment:
    file: MetricsFile | None = None
    refused = False  # the file could not be opened
    at_once = False  # on a terminal, each step's record must appear between what the script prints


@atexit.register
def flush() -> None:
    """Write the waiting records to the file that ``XLA_METRICS_FILE`` names, if there is one."""
    if _OfEnvironment.file is not None:
        _OfEnvironment.file.flush()


def on_step(_event: events.StepMarked) -> None:
    """A step ended: add its record to the file that ``XLA_METRICS_FILE`` names."""
    file = _OfEnvironment.file
    if file is None:
        if _OfEnvironment.refused or not runtime.started():
            return
        path = settings.METRICS_FILE.get()
        try:
            file = _start(path)
        except OSError as error:
            _OfEnvironment.refused = True
            _warn_unwritable(path, error)
            return
    file.write()
    if _OfEnvironment.at_once:
        file.flush()


def _start(path: str) -> MetricsFile:
    file = _OfEnvironment.file = MetricsFile(opened(path))
    _OfEnvironment.at_once = path in STANDARD_STREAMS
    if not _OfEnvironment.at_once:
        file.write_behind()
    return file


def save_metrics(metrics_file: str | None = None) -> None:
    """Append the metrics report to ``metrics_file``, by default to the file that ``XLA_METRICS_FILE`` names.

    Does nothing if there is neither.
    """
    path = metrics_file or settings.METRICS_FILE.get()
    if not path:
        return
    if path in STANDARD_STREAMS:
        opened(path).write(f"{counters.report()}\n")
        return
    with path_of_process(path).open("a") as stream:
        stream.write(f"{counters.report()}\n")
