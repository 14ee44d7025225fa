"""Records where the time of each step goes, for ``xla-debug run``, by listening to events.

The wall time of a step is divided into parts that do not overlap: those that the core measures, and the rest, which
is Python (the script, and the recording of operators). The device works at the same time; only the time that the
host waits for it appears here.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from xla_core.contract import events
from xla_core.contract.foreign_values import Attribute, ForeignObject
from xla_core.extension_api import runtime
from xla_core.extension_api.source_location import Frame
from xla_debug import recompile
from xla_debug.run_report.records import Run, Sent, Spot, Step, What, loop_of
from xla_debug.run_report.survivors import Births
from xla_debug.stacks import stack_frames, statements, sync_causes
from xla_debug.stacks.sync_causes import SyncCause
from xla_debug.steps.differences import name_of
from xla_debug.steps.recompile_text import Explanation

# Smaller values are not compared with earlier ones: they are single numbers, whose transfer costs next to nothing.
_COMPARED_BYTES: Final = 256
# The number of different sent values above which those that were sent only once are dropped.
_MOST_SENT: Final = 4096


class Recorder:
    """Records a ``Step`` for each step that the script ends between ``start`` and ``stop``.

    ``spots`` has the fallbacks and reads by line, ``sent`` the values that were sent to the device by line and
    checksum. ``optimizer`` counts the optimizers' steps by line, and ``optimizer_steps`` has the lines of the
    sync() calls after each of them. ``loaders`` has the nanoseconds of data loaders by line. ``startup`` are the
    seconds before the script used a device, for imports and reading data, which belong to no step. ``unfinished``
    has the operations that were recorded but never ran. ``peak`` is the most device memory in use, in bytes.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.spots: dict[tuple[What, str, Frame | None], Spot] = {}
        self.sent: dict[tuple[Frame | None, int], Sent] = {}
        self.optimizer: Counter[Frame] = Counter()
        self.optimizer_steps: list[list[Frame]] = [[]]
        self.loaders: Counter[Frame | None] = Counter()
        self.births = Births()
        self.unfinished: Run | None = None
        self.seconds = self.startup = 0.0
        self.peak: int | None = None
        self._first_explanation = len(recompile.explanations())
        self._step = Step(1)
        self._began = self._origin = 0
        self._building = 0
        self._ran = 0
        self._own = 0
        self._used = False
        self._copies: list[tuple[int, int]] = []
        self._reads: list[tuple[int, int, Spot]] = []
        self._built: list[tuple[int, int]] = []
        self._run = Run(None, SyncCause.SYNC, 0)
        self._size_operator = ""
        self._remove: list[Callable[[], None]] = []
        self._loader_iter: Callable[[object], Iterator[object]] | None = None

    # -- attaching ------------------------------------------------------------------------------

    def start(self) -> None:
        """Subscribe to the core's events, and measure the time of ``DataLoader`` iterators."""
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
            register_optimizer_step_post_hook(self._optimized).remove,
        ]
        self._loader_iter = original = DataLoader.__iter__

        def timed(loader: object) -> object:
            frame = _user_frame()
            return _TimedIterator(original(loader), lambda took: self._data(took, frame))

        DataLoader.__iter__ = timed  # type: ignore[method-assign]

    def stop(self) -> None:
        """Stop recording. If anything ran after the last step, it becomes another step."""
        for remove in self._remove:
            remove()
        DataLoader.__iter__ = self._loader_iter  # type: ignore[method-assign]
        self.seconds = (time.perf_counter_ns() - self._origin) / 1e9
        pending = sum(trace.cur.depth for trace in runtime.traces()) if runtime.started() else 0
        if pending:
            self._run.operations = pending
            self.unfinished = self._run
        if self._step.operations:
            self._close()

    def explanations(self) -> list[Explanation]:
        """The explanations why programs were made since ``start``."""
        return recompile.explanations()[self._first_explanation :]

    # -- events ---------------------------------------------------------------------------------

    def _compiled(self, event: events.ProgramCompiled) -> None:
        self._made(event.lowering + event.compiling)
        self._run.loop = loop_of(event.entries)
        self._run.program = event.program.name

    def _loaded(self, event: events.ProgramLoaded) -> None:
        self._made(event.loading)

    def _uses_device(self, nanoseconds: int) -> None:
        """The first event begins the first step; it took this number of nanoseconds."""
        if not self._used:
            self._used = True
            self._began = max(self._origin, time.perf_counter_ns() - nanoseconds)
            self.startup = (self._began - self._origin) / 1e9

    def _made(self, nanoseconds: int) -> None:
        self._uses_device(nanoseconds)
        self._building += nanoseconds
        self._built.append((time.perf_counter_ns(), nanoseconds))
        self._run.compiling += nanoseconds
        self._step.parts["compile"] += nanoseconds
        self._step.compilations.append(len(recompile.explanations()) - 1 - self._first_explanation)

    def _executed(self, event: events.ProgramExecuted) -> None:
        self._ran += event.nanoseconds
        self._step.parts["execute"] += event.nanoseconds
        last = event.trace.cur
        self._size_operator = name_of(last).removesuffix(" inspected").removesuffix(".default")
        self.births.made(last, event.program.output_index, event.results)

    def _flushed(self, event: events.Flushed) -> None:
        began = time.perf_counter_ns() - event.nanoseconds
        copied = sum(took for end, took in self._copies if end >= began)
        self._copies.clear()
        rest = event.nanoseconds - self._building - self._ran - copied
        self._step.parts["sync"] += max(0, rest)
        self._step.operations += event.operations
        self._building = self._ran = 0
        cause, stack = sync_causes.current()
        run = dataclasses.replace(
            self._run,
            cause=cause,
            asked_at=stack[0] if stack else None,
            operations=event.operations,
            nanoseconds=event.nanoseconds,
        )
        self._step.runs.append(run)
        self._run = Run(None, SyncCause.SYNC, 0)

    def _sent(self, event: events.TransferToDevice) -> None:
        took = event.nanoseconds
        self._uses_device(took)
        self._copies.append((time.perf_counter_ns(), took))
        self._step.parts["transfer"] += took
        self._step.sent += event.nbytes
        if event.nbytes >= _COMPARED_BYTES:
            began = time.perf_counter_ns()
            self._compare(event.array, event.nbytes, took)
            self._own += time.perf_counter_ns() - began

    def _compare(self, array: object, nbytes: int, took: int) -> None:
        """Count the values that a line sends, by their checksum, to find those that it sends again."""
        frame = _user_frame()
        content = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if len(self.sent) >= _MOST_SENT:  # batches that are sent once: only repeated values matter
            self.sent = {key: sent for key, sent in self.sent.items() if sent.count > 1}
        sent = self.sent.setdefault((frame, content), Sent(frame, nbytes))
        sent.nanoseconds += took if sent.count else 0
        sent.count += 1

    def _received(self, event: events.TransferFromDevice) -> None:
        waited = event.waited
        self._step.parts["execute"] += waited
        self._step.parts["transfer"] += event.nanoseconds - waited
        self._step.received += event.nbytes
        spot = self._reader()
        spot.count += 1
        spot.nanoseconds += event.nanoseconds
        self._reads.append((time.perf_counter_ns(), event.nanoseconds, spot))

    def _reader(self) -> Spot:
        """The spot of the line that is reading a value."""
        start = sys._getframe(2)
        cause, stack = sync_causes.current(start)
        line = stack[0] if stack else None
        if cause is SyncCause.SIZE:
            return self._spot(What.SIZE, self._size_operator, line)
        if stack_frames.is_printing(start):
            return self._spot(What.PRINT, "", line)
        condition = line is not None and statements.is_condition(line)
        return self._spot(What.CONDITION if condition else What.VALUE, "", line)

    def _waited(self, event: events.Waited) -> None:
        self._step.parts["execute"] += event.nanoseconds

    def _data(self, nanoseconds: int, frame: Frame | None) -> None:
        self._uses_device(nanoseconds)
        if threading.current_thread() is threading.main_thread():
            self._step.parts["data"] += nanoseconds
            self.loaders[frame] += nanoseconds

    def _fell_back(self, event: events.Fallback) -> None:
        began = time.perf_counter_ns() - event.nanoseconds
        # remove the reads of its operands, which its own time includes
        while self._reads and self._reads[-1][0] >= began:
            _, took, spot = self._reads.pop()
            spot.count -= 1
            spot.nanoseconds -= took
            if not spot.count:
                del self.spots[spot.what, spot.operator, spot.frame]
        spot = self._spot(What.FALLBACK, event.operator, Frame("", event.filename, event.line))
        spot.count += 1
        spot.nanoseconds += event.nanoseconds - sum(n for end, n in self._built if end >= began)

    def _optimized(self, _optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        frame = _user_frame()
        if frame is not None:
            self.optimizer[frame] += 1
            self._run.optimizer[frame] += 1
            self.optimizer_steps.append([])

    def _marked(self, _event: events.StepMarked) -> None:
        frame = _user_frame()
        self._step.ended = frame
        if frame is not None:
            self.optimizer_steps[-1].append(frame)
        self._finish()

    def _finish(self) -> None:
        now = time.perf_counter_ns()
        for run in self._step.runs[:-1]:
            if not run.cause.ends_step:
                self._cut(run)
        info = runtime.client().memory_info(0)
        self._step.memory = info.bytes_used
        self.peak = max(self.peak or 0, info.bytes_used, info.peak_bytes_used)
        self._close(now)
        self._step = Step(len(self.steps) + 1)
        self._copies.clear()
        self._reads.clear()
        self._built.clear()
        self.births.step_ended()
        self._began = time.perf_counter_ns()

    def _cut(self, run: Run) -> None:
        """A run in the middle of a step: count it for the line that read a value."""
        for spot in self.spots.values():
            if spot.frame == run.asked_at:
                spot.cuts += 1

    def _close(self, now: int | None = None) -> None:
        self._step.close((now or time.perf_counter_ns()) - self._began - self._own)
        self._own = 0
        self.steps.append(self._step)

    def _spot(self, what: What, operator: str, frame: Frame | None) -> Spot:
        return self.spots.setdefault((what, operator, frame), Spot(what, operator, frame))


def _user_frame() -> Frame | None:
    frames = stack_frames.user_frames(sys._getframe(2), limit=1)
    return frames[0] if frames else None


class _TimedIterator:
    """An iterator that reports how long each ``next`` takes."""

    def __init__(self, inner: ForeignObject, report: Callable[[int], None]) -> None:
        self._inner = inner
        self._report = report

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        # A loader may run programs (if it collates on the device). That is not waiting for data, but it is too rare
        # to be counted separately.
        started = time.perf_counter_ns()
        try:
            return next(self._inner)
        finally:
            self._report(time.perf_counter_ns() - started)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Attribute:
        return getattr(self._inner, name)
