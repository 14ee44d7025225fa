"""Functions that a training loop asks to be called at the end of a step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_pending: dict[torch.device, list[Callable[[], Any]]] = {}
_async_pending: dict[torch.device, list[Callable[[], Any]]] = {}
_lock = threading.Lock()


class ClosureHandler:
    """Runs closures one after the other, in the calling thread."""

    def run(self, closure: Callable[[], Any]) -> None:
        """Call ``closure()``; what it raises is raised here."""
        closure()

    def run_all(self, closures: Sequence[Callable[[], Any]]) -> None:
        """Call all of them in order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """One thread that runs closures in order; the first exception is kept and raised at the next call.

    ``run`` waits while ``max_queue_size`` closures (default 100) are waiting; 0 sets no bound.
    """

    def __init__(self, max_queue_size: int = 100) -> None:
        self.queue: queue.Queue[Callable[[], Any]] = queue.Queue(max_queue_size)
        self.error: BaseException | None = None
        threading.Thread(target=self._work, name="xla-step-closures", daemon=True).start()

    def _work(self) -> None:
        while True:
            closure = self.queue.get()
            try:
                if self.error is None:
                    closure()
            except BaseException as error:
                self.error = error
            finally:
                self.queue.task_done()

    def run(self, closure: Callable[[], Any]) -> None:
        """Enqueue ``closure``. Raises RuntimeError when an earlier one failed."""
        self.raise_error()
        self.queue.put(closure)

    def raise_error(self) -> None:
        """Raise what a closure raised since the last call."""
        error, self.error = self.error, None
        if error is not None:
            raise RuntimeError(f"a step closure with run_async=True failed: {error}") from error


_runners: dict[torch.device, AsyncClosureHandler] = {}


def add(
    device: torch.device,
    closure: Callable[..., Any],
    args: Sequence[Any] = (),
    run_async: bool = False,
) -> None:
    """Call ``closure(*args)`` after the next step of ``device``; tensors in ``args`` have values then."""
    table = _async_pending if run_async else _pending
    with _lock:
        table.setdefault(device, []).append(lambda: closure(*args))


def run(device: torch.device) -> None:
    """Run what was added; raise what an asynchronous closure raised earlier."""
    if not _pending and not _async_pending and not _runners:
        return
    with _lock:
        now = _pending.pop(device, [])
        later = _async_pending.pop(device, [])
        runner = _runners.get(device)
        if later and runner is None:
            runner = _runners[device] = AsyncClosureHandler()
    if runner is not None:
        runner.raise_error()
        runner.run_all(later)
    ClosureHandler().run_all(now)


def wait() -> None:
    """Wait for asynchronous closures, and raise what they raised."""
    for runner in list(_runners.values()):
        runner.queue.join()
        runner.raise_error()
