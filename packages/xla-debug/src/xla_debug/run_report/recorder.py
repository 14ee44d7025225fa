"""Records where the time of each step goes, for ``xla-debug run``: a listener, nothing else.

A step's wall time is split into parts that do not overlap: what the core times is subtracted, and what
is left is Python (the script and the recording of operators). The device works beside all of it;
only what the host waits for it shows here.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch.utils.data import DataLoader

from xla_core.contract import events
from xla_core.extension_api import runtime
from xla_core.extension_api.source_location import Frame
from xla_debug import recompile
from xla_debug.stacks import stack_frames
from xla_debug.steps.recompile_text import Explanation

PARTS: Final = ("tracing", "sync", "compile", "execute", "transfer", "data")
"""Parts of a step: Python, preparing a run, compiling, waiting for results, copying, waiting for data."""


@dataclasses.dataclass
class Step:
    """One step: nanoseconds by part, its compilations, and the device's memory at its end."""

    number: int
    wall: int = 0
    parts: Counter[str] = dataclasses.field(default_factory=Counter)
    operations: int = 0
    compilations: list[int] = dataclasses.field(default_factory=list)
    sent: int = 0
    received: int = 0
    memory: int | None = None

    def close(self, wall: int) -> None:
        """Give the rest of the wall time to Python."""
        self.wall = wall
        known = sum(self.parts.values())
        self.parts["tracing"] = max(0, wall - known)


@dataclasses.dataclass
class Spot:
    """A line that made the host wait: how often and for how many nanoseconds."""

    what: str
    frame: Frame | None
    count: int = 0
    nanoseconds: int = 0


class Recorder:
    """Between ``start`` and ``stop``, a ``Step`` per step that the script ends.

    ``spots`` are fallbacks and value reads by line. ``startup`` is the seconds before the script used a
    device: imports and reading data, which belong to no step.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.spots: dict[tuple[str, Frame | None], Spot] = {}
        self.seconds = self.startup = 0.0
        self.peak: int | None = None
        self._first_explanation = len(recompile.explanations())
        self._step = Step(1)
        self._began = self._origin = 0
        self._building = 0
        self._ran = 0
        self._used = False
        self._copies: list[tuple[int, int]] = []
        self._fallback: Spot | None = None
        self._remove: list[Callable[[], None]] = []
        self._loader_iter: Any = None

    # -- attaching ------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and time what ``DataLoader`` iterators take."""
        self._origin = self._began = time.perf_counter_ns()
        self._remove = [
            events.subscribe(events.ProgramCompiled, self._compiled),
            events.subscribe(events.ProgramLoaded, self._loaded),
            events.subscribe(events.ProgramExecuted, self._executed),
            events.subscribe(events.Flushed, self._flushed),
            events.subscribe(events.TransferToDevice, self._sent),
            events.subscribe(events.TransferFromDevice, self._received),
            events.subscribe(events.Waited, self._waited),
            events.subscribe(events.Fallback, self._fell_back),
            events.subscribe(events.StepMarked, self._marked),
        ]
        self._loader_iter = original = DataLoader.__iter__

        def timed(loader: Any) -> Any:
            return _TimedIterator(original(loader), self._data)

        DataLoader.__iter__ = timed  # type: ignore[method-assign]

    def stop(self) -> None:
        """End recording; what came after the last step becomes a last one if anything ran in it."""
        for remove in self._remove:
            remove()
        DataLoader.__iter__ = self._loader_iter  # type: ignore[method-assign]
        self.seconds = (time.perf_counter_ns() - self._origin) / 1e9
        if self._step.operations:
            self._close()

    def explanations(self) -> list[Explanation]:
        """Why each program since the start was made."""
        return recompile.explanations()[self._first_explanation :]

    # -- events ---------------------------------------------------------------------------------

    def _compiled(self, event: events.ProgramCompiled) -> None:
        self._made(event.lowering + event.compiling)

    def _loaded(self, event: events.ProgramLoaded) -> None:
        self._made(event.loading)

    def _uses_device(self, nanoseconds: int) -> None:
        """The first step begins with the first event, which took so long."""
        if not self._used:
            self._used = True
            self._began = max(self._origin, time.perf_counter_ns() - nanoseconds)
            self.startup = (self._began - self._origin) / 1e9

    def _made(self, nanoseconds: int) -> None:
        self._uses_device(nanoseconds)
        self._building += nanoseconds
        self._step.parts["compile"] += nanoseconds
        self._step.compilations.append(len(recompile.explanations()) - 1 - self._first_explanation)

    def _executed(self, event: events.ProgramExecuted) -> None:
        self._ran += event.nanoseconds
        self._step.parts["execute"] += event.nanoseconds

    def _flushed(self, event: events.Flushed) -> None:
        began = time.perf_counter_ns() - event.nanoseconds
        copied = sum(took for end, took in self._copies if end >= began)
        self._copies.clear()
        rest = event.nanoseconds - self._building - self._ran - copied
        self._step.parts["sync"] += max(0, rest)
        self._step.operations += event.operations
        self._building = self._ran = 0

    def _sent(self, event: events.TransferToDevice) -> None:
        took = event.nanoseconds
        self._uses_device(took)
        self._copies.append((time.perf_counter_ns(), took))
        self._step.parts["transfer"] += took
        self._step.sent += event.nbytes
        self._fallback = None

    def _received(self, event: events.TransferFromDevice) -> None:
        waited = event.waited
        self._step.parts["execute"] += waited
        self._step.parts["transfer"] += event.nanoseconds - waited
        self._step.received += event.nbytes
        spot = self._fallback or self._spot("value read", _user_frame())
        if spot is not self._fallback:
            spot.count += 1
        spot.nanoseconds += event.nanoseconds

    def _waited(self, event: events.Waited) -> None:
        self._step.parts["execute"] += event.nanoseconds

    def _data(self, nanoseconds: int) -> None:
        self._uses_device(nanoseconds)
        if threading.current_thread() is threading.main_thread():
            self._step.parts["data"] += nanoseconds

    def _fell_back(self, event: events.Fallback) -> None:
        frame = Frame("", event.filename, event.line)
        self._fallback = self._spot(event.operator, frame)
        self._fallback.count += 1

    def _marked(self, _event: events.StepMarked) -> None:
        self._finish()

    def _finish(self) -> None:
        now = time.perf_counter_ns()
        info = runtime.client().memory_info(0)
        self._step.memory = info.bytes_used
        self.peak = max(self.peak or 0, info.bytes_used, info.peak_bytes_used)
        self._close(now)
        self._step = Step(len(self.steps) + 1)
        self._copies.clear()
        self._began = time.perf_counter_ns()

    def _close(self, now: int | None = None) -> None:
        self._step.close((now or time.perf_counter_ns()) - self._began)
        self.steps.append(self._step)

    def _spot(self, what: str, frame: Frame | None) -> Spot:
        return self.spots.setdefault((what, frame), Spot(what, frame))


def _user_frame() -> Frame | None:
    found = stack_frames.user_frames(sys._getframe(2), limit=1)
    return found[0] if found else None


class _TimedIterator:
    """An iterator that reports how long each ``next`` takes."""

    def __init__(self, inner: Any, report: Callable[[int], None]) -> None:
        self._inner = inner
        self._report = report

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # a loader may run programs itself (collate on the device); that is not waiting for data,
        # but too rare to be worth telling apart
        started = time.perf_counter_ns()
        try:
            return next(self._inner)
        finally:
            self._report(time.perf_counter_ns() - started)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
