"""Step closures: functions that a training loop registers to be called at the end of a step."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from xla_core.execution import runtime
from xla_core.recording.step_turns import Step
from xla_core.torch_bridge.operands import Operand

_Added = dict[torch.device, list[tuple[Step, Callable[[], object]]]]
_pending: _Added = {}
_async_pending: _Added = {}
_lock = threading.Lock()


class ClosureHandler:
    """Runs closures one after another in the calling thread."""

    def run(self, closure: Callable[[], object]) -> None:
        """Call ``closure()``, and let its exceptions through."""
        closure()

    def run_all(self, closures: Sequence[Callable[[], object]]) -> None:
        """Call all of them in order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Runs closures in order in a thread of its own; raises their first exception at the next call.

    ``run`` blocks while ``max_queue_size`` closures (default: 100) are waiting; 0 sets no bound.
    """

    def __init__(self, max_queue_size: int = 100) -> None:
        self.queue: queue.Queue[Callable[[], object] | None] = queue.Queue(max_queue_size)
        self.error: BaseException | None = None
        self._closed = False
        thread = threading.Thread(target=self._work, name="xla-step-closures", daemon=True)
        thread.start()
        # a thread that returned from C++ while Python shuts down would abort the process
        atexit.register(self._end, thread)

    def _work(self) -> None:
        while (closure := self.queue.get()) is not None:
            try:
                if self.error is None:
                    closure()
            except BaseException as error:
                self.error = error
            finally:
                self.queue.task_done()

    def run(self, closure: Callable[[], object]) -> None:
        """Enqueue ``closure``. Raises RuntimeError when an earlier one failed."""
        self.raise_error()
        if self._closed:
            closure()
        else:
            self.queue.put(closure)

    def _end(self, thread: threading.Thread) -> None:
        """At the end of the process: run the waiting closures, and run later ones immediately."""
        self._closed = True
        if thread.is_alive():  # it is not alive in the child of a fork
            self.queue.put(None)
            thread.join()

    def raise_error(self) -> None:
        """Raise the exception of a closure since the last call, if any."""
        error, self.error = self.error, None
        if error is not None:
            raise RuntimeError(f"a step closure with run_async=True failed: {error}") from error


_runners: dict[torch.device, AsyncClosureHandler] = {}


def add(
    device: torch.device,
    closure: Callable[..., object],
    args: Sequence[Operand] = (),
    run_async: bool = False,
) -> None:
    """Call ``closure(*args)`` after the calling thread's step on ``device``, when its tensors have values."""
    table = _async_pending if run_async else _pending
    step = _step(device)
    with _lock:
        table.setdefault(device, []).append((step, lambda: closure(*args)))


def waiting(device: torch.device) -> int:
    """The number of closures that wait for the end of a step on ``device``."""
    with _lock:
        return len(_pending.get(device, ())) + len(_async_pending.get(device, ()))


def _step(device: torch.device) -> Step:
    trace = runtime.trace_of(device)
    with trace.lock:
        return trace.turns.active


def _ended(table: _Added, device: torch.device, step: Step) -> list[Callable[[], object]]:
    """Remove and return the closures that wait for this step, or for that of a thread that has ended."""
    added = table.pop(device, [])
    waiting = [one for one in added if one[0] is not step and not one[0].ended]
    if waiting:
        table[device] = waiting
    return [closure for one, closure in added if one is step or one.ended]


def run(device: torch.device) -> None:
    """Run the closures that the calling thread added; raises the error of an earlier asynchronous closure."""
    if not _pending and not _async_pending and not _runners:
        return
    step = _step(device)
    with _lock:
        now = _ended(_pending, device, step)
        later = _ended(_async_pending, device, step)
        runner = _runners.get(device)
        if later and runner is None:
            runner = _runners[device] = AsyncClosureHandler()
    if runner is not None:
        runner.raise_error()
        runner.run_all(later)
    ClosureHandler().run_all(now)


def wait() -> None:
    """Wait for asynchronous closures, and raise their errors."""
    for runner in list(_runners.values()):
        runner.queue.join()
        runner.raise_error()
