"""The runs of one device that wait for their programs, and the thread that starts them in order.

A step whose program is still being compiled is put into the queue, and its tensors hold ``Awaited`` objects in
place of buffers. Later steps wait behind it, whether they have a program or not, because a device runs programs in
the order in which they were requested. The next sync or read *settles* the runs that have ended: it gives tensors
their buffers, and handles failed runs. Until a failed run is settled, no later run starts.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Final

from xla_core.compilation import compile_threads
from xla_core.compilation.program_table import StepProgram
from xla_core.contract.device_protocol import Buffer
from xla_core.recording.storage import HeldBuffer, Storage, never_computed
from xla_core.recording.trace import Trace

MOST_WAITING: Final = 8
"""At most this many runs wait, because each holds its arguments; the next sync then waits for the first of them."""


# The ids of the living awaited values, which tell quickly that there are none (the usual case). A set, because
# several threads make and drop them, and adding to a set and removing from it are indivisible.
_living: Final[set[int]] = set()


class Awaited:
    """Stands in for the buffer of a value that ``run`` will compute.

    ``held`` is the buffer once the run has started. If ``error`` is set, the run has failed, and ``held`` is the
    buffer that the tensor had before, or None.
    """

    __slots__ = ("__weakref__", "error", "held", "run")

    def __init__(self, run: DeferredRun) -> None:
        _living.add(id(self))
        self.run = run
        self.held: HeldBuffer = None
        self.error: Exception | None = None

    def __del__(self) -> None:
        _living.discard(id(self))

    def value(self) -> Buffer:
        """Wait for the buffer and return it. Raises RuntimeError if the value was never computed."""
        if self.held is None and self.error is None:
            self.run.queue.settle(self.run)
        if self.error is not None:
            raise never_computed(self.error) from self.error
        return self.held


def any_awaited() -> bool:
    """Whether tensors or steps hold awaited values."""
    return bool(_living)


def value_of(buffer: HeldBuffer) -> HeldBuffer:
    """``buffer``; if it is awaited, wait for it and return the real buffer."""
    return buffer.value() if type(buffer) is Awaited else buffer


class Result:
    """One result of a run: its value number in the step, its position in the program's results, its ``Awaited``.

    ``former`` is the slot of the input that was the tensor's value before the step, or None.
    """

    __slots__ = ("awaited", "former", "position", "vid")

    def __init__(self, awaited: Awaited, vid: int, position: int, former: int | None) -> None:
        self.awaited = weakref.ref(awaited)
        self.vid = vid
        self.position = position
        self.former = former


class DeferredRun:
    """One run of ``program`` on ``arguments``, some of which may be awaited.

    ``trace`` is a copy of the trace at the end of the step, without its tensors. ``start`` launches the
    run and returns the program's results. ``thread`` is the number of the thread that requested it.
    """

    def __init__(
        self,
        queue: LaunchQueue,
        trace: Trace,
        program: StepProgram,
        arguments: list[HeldBuffer],
        start: Callable[[DeferredRun], Sequence[Buffer]],
    ) -> None:
        self.queue = queue
        self.trace = trace
        self.program = program
        self.arguments = arguments
        self.results: list[Result] = []
        self.storages: list[weakref.ref[Storage]] = []
        self.thread = get_ident()
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.handled = threading.Event()
        self._start = start

    def go(self) -> None:
        """Wait for the program, and start the run; an exception is kept in ``error``."""
        try:
            self.program.wait_until_made()
            for argument in self.arguments:
                if type(argument) is Awaited and argument.error is not None:
                    raise argument.error
            self.fill(self._start(self))
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    def fill(self, results: Sequence[Buffer]) -> None:
        """Give the awaited values their buffers, and release the arguments."""
        for result in self.results:
            awaited = result.awaited()
            if awaited is not None:
                awaited.held = results[result.position]
        self.arguments = []


class LaunchQueue:
    """The waiting runs of one device. Everything except the launching thread's work happens under the trace's lock.

    ``unsettled`` are the runs whose tensors still hold awaited values, the oldest first. ``untold`` is an error
    that has not been raised yet. ``failed`` says that a run of this queue has ever failed.
    """

    def __init__(self) -> None:
        self.unsettled: deque[DeferredRun] = deque()
        self.untold: Exception | None = None
        self.failed = False
        self._settle: Callable[[DeferredRun], None] | None = None
        self._jobs: queue.SimpleQueue[DeferredRun | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        _queues.add(self)

    def open(self, settle: Callable[[DeferredRun], None]) -> None:
        """Prepare for runs. ``settle(run)`` must wait until ``run`` has ended, and settle it."""
        self._settle = settle
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        self._thread = threading.Thread(
            target=_launch, args=(self._jobs,), name="xla-launch", daemon=True
        )
        self._thread.start()

    def adding(self, run: DeferredRun) -> Iterator[object]:
        """For ``indivisible.do``: append ``run`` to the queue."""
        return itertools.chain(map(self.unsettled.append, (run,)), map(self._jobs.put, (run,)))

    def settle(self, run: DeferredRun) -> None:
        """Wait until ``run`` has ended, and settle it and all earlier runs."""
        assert self._settle is not None
        self._settle(run)

    def finish(self) -> None:
        """Wait until all runs have started, and settle them. Raises the error of a failed run."""
        if self.unsettled:
            self.settle(self.unsettled[-1])
        self.tell()

    def tell(self) -> None:
        """Raise the error that has not been raised yet, if there is one."""
        error, self.untold = self.untold, None
        if error is not None:
            raise error

    def wait(self, own: bool = False) -> None:
        """Wait until all runs have started, or one has failed; with ``own``, only those of the calling thread.

        Raises nothing and settles nothing.
        """
        for run in list(self.unsettled):
            if own and run.thread != get_ident():
                continue
            run.ended.wait()
            if run.error is not None and not run.handled.is_set():
                return

    def close(self) -> None:
        """At the end of the process: wait until all runs have started, and end the thread.

        The thread is not joined after a failed run that is not settled, because it waits for that.
        """
        self.wait()
        self._jobs.put(None)
        failed = any(run.error is not None and not run.handled.is_set() for run in self.unsettled)
        if self._thread is not None and not failed:
            self._thread.join()

    def begin_anew(self) -> None:
        """Continue in the child of a fork, which has none of its parent's threads."""
        self._jobs = queue.SimpleQueue()
        self._thread = None
        left = [run for run in self.unsettled if not run.ended.is_set()]
        if left:  # they wait behind a failed run
            self._begin()
            for run in left:
                self._jobs.put(run)


_queues: weakref.WeakSet[LaunchQueue] = weakref.WeakSet()


def _launch(jobs: queue.SimpleQueue[DeferredRun | None]) -> None:
    while (run := jobs.get()) is not None:
        run.go()
        if run.error is not None:
            run.handled.wait()
        del run


def _wait_for_all() -> None:
    """Before the process forks: wait, because no compiler thread may be in the middle of its work."""
    for one in list(_queues):
        one.wait()


def _close_all() -> None:
    for one in list(_queues):
        one.close()


def _begin_anew() -> None:
    for one in list(_queues):
        one.begin_anew()


compile_threads.before_closing(_close_all)
os.register_at_fork(before=_wait_for_all, after_in_child=_begin_anew)
