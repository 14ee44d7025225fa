"""Background threads that compile programs while the main thread records.

Lowering is Python code and holds the interpreter lock; the compiler behind ``DeviceClient.compile`` releases it.
Threads are started when there is work, and joined at the end of the process, because a thread inside the compiler
at that time would crash the process.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final, Generic, TypeVar

from xla_core.support import flags

MOST_THREADS: Final = 8
"""The largest default, because every compilation needs memory of its own."""

_T = TypeVar("_T")


def wanted() -> int:
    """How many programs may be compiled at once; 0 if nothing is compiled in the background."""
    asked = flags.COMPILE_THREADS.get()
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_THREADS) if (cores or 1) > 1 else 0


class _Job(Generic[_T]):
    """A function to call, and the future of its result."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._mine = threading.Lock()
        self.future: Future[_T] = Future()

    def run(self) -> None:
        """Call the function, unless another thread has begun to, or the job was cancelled."""
        if not self._mine.acquire(blocking=False) or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Pool:
    """The threads, and the jobs that wait for them."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.unfinished: set[Future[object]] = set()
        self.closed = False

    def submit(self, job: _Job) -> None:
        """Let a thread run ``job``; at the end of the process, the calling thread runs it."""
        with self.lock:
            closed = self.closed
            if not closed:
                self._add(job)
        if closed:
            job.run()

    def _add(self, job: _Job) -> None:
        self.unfinished.add(job.future)
        if len(self.threads) < min(wanted(), len(self.unfinished)):
            thread = threading.Thread(target=self._work, name="xla-compile", daemon=True)
            self.threads.append(thread)
            thread.start()
        job.future.add_done_callback(self.unfinished.discard)
        self.jobs.put(job)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job

    def close(self) -> None:
        """Accept no more jobs, and wait for the existing ones and for the threads."""
        with self.lock:
            self.closed = True
            threads = list(self.threads)
        wait(list(self.unfinished))
        for _ in threads:
            self.jobs.put(None)
        for thread in threads:
            thread.join()


_pool = _Pool()


def _begin_anew() -> None:
    """In the child of a fork, which has none of its parent's threads."""
    global _pool
    _pool = _Pool()


_first: list[Callable[[], None]] = []


def before_closing(function: Callable[[], None]) -> None:
    """Call ``function()`` when the process ends, before the threads are waited for."""
    _first.append(function)


def _close() -> None:
    try:
        for function in _first:
            function()
    finally:
        _pool.close()


atexit.register(_close)
os.register_at_fork(after_in_child=_begin_anew)


def is_closed() -> bool:
    """Whether the process is ending, so that nothing more is compiled in the background."""
    return _pool.closed


def submit(function: Callable[[], _T]) -> Future[_T]:
    """Call ``function()`` in one of the threads; the future holds its result or exception.

    The caller must have checked that ``wanted()`` is not 0.
    """
    job = _Job(function)
    _pool.submit(job)
    return job.future


def run_each(functions: Sequence[Callable[[], _T]]) -> list[_T]:
    """Call functions concurrently, also in the calling thread, and return their results in order.

    Raises the exception of the first function (in this order) that fails; functions that have not begun by then
    are not called.
    """
    if len(functions) < 2 or wanted() < 2:
        return [function() for function in functions]
    jobs = [_Job(function) for function in functions]
    for job in jobs[1:]:
        _pool.submit(job)
    try:
        for job in jobs:
            job.run()
        return [job.future.result() for job in jobs]
    finally:
        for job in jobs:
            job.future.cancel()
