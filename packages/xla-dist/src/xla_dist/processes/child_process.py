"""How a process of a job begins and ends: it joins the other processes, and reports how it ended.

``run_child`` is the main function of a process that our launcher starts. ``attend`` does the same work in a process
that torchrun or a user started: from the start of its device client until the interpreter exits.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection as pipes
from types import TracebackType
from typing import Final

from xla_core.extension_api import distributed, jobs, runtime, training
from xla_core.extension_api.jobs import Job
from xla_core.support import flags
from xla_core.support.once import Once
from xla_dist.job_health import failure_reports, flight_recorder, thread_states
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.job_health.collective_order import Difference
from xla_dist.job_health.launch_log import LaunchLog
from xla_dist.processes import session

# Added to the failure timeout: a process that fails needs this long to publish its error.
_PUBLISH_SECONDS: Final = 2.0
MSG_INTERRUPTED: Final = "interrupted (KeyboardInterrupt)"
# The watchdog's threads may still wait for an answer of a coordinator that has gone; on a busy machine such a
# request takes this long to fail.
_THREADS_SECONDS: Final = 20.0


class PeerFailedError(RuntimeError):
    """A collective failed because another process of the job failed or died; the message names that process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """How a process ended.

    ``traceback`` is empty if it succeeded. ``kind`` says whose fault a failure is: ``"own"``, a
    ``"consequence"`` of another process's end, or a ``"difference"`` between the processes' programs. ``when`` is
    the Unix time of the end. ``result`` is what the function returned, pickled, and None if that cannot be
    pickled, which ``result_error`` then explains. ``flight`` is the path of the flight report that the process
    has written, if any.
    """

    traceback: str
    kind: str
    when: float
    result: bytes | None = None
    result_error: str = ""
    flight: str = ""


class _Launcher:
    """The launcher, which hears from this process once: the watchdog may end it while it reports its own error."""

    def __init__(self, pipe: pipes.Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._heard = Once()

    def send(self, report: Report) -> None:
        """Send the first report; later ones are consequences of it."""
        with self._lock:
            if self._heard.begin():
                # the launcher may have gone, which the watchdog handles
                with contextlib.suppress(OSError, ValueError):
                    self._pipe.send(report)


def run_child(
    job: Job,
    pipe: pipes.Connection,
    environment: dict[str, str],
    fn: Callable[..., object],
    args: Sequence[object],
    launch_log: LaunchLog | None = None,
    environment_is_whole: bool = False,
) -> None:
    """Call ``fn(ordinal, *args)`` as process ``job.index`` of the job, and send a ``Report`` through ``pipe``.

    This is the main function of each process that the launcher starts. ``environment`` is added to ``os.environ``;
    if ``environment_is_whole`` (default: False), it replaces ``os.environ``. ``launch_log`` is the
    memory in which the processes of this host log their launches (default: None, no such memory).
    """
    variables = os.environ
    for name in set(variables).difference(environment) if environment_is_whole else ():
        del variables[name]
    variables.update(environment)
    launcher = _Launcher(pipe)
    _attended.begin()
    failure_reports.follow_launcher()
    try:
        thread_states.runtime_starts()
        jobs.connect(job)
        thread_states.runtime_started()
        current = session.begin()
        if current is not None and current.watchdog is not None:
            current.order_check.launch_log = launch_log
            current.watchdog.on_end = lambda text, kind: launcher.send(
                Report(text, kind, time.time())
            )
        result = fn(job.index, *args)
        training.wait_for_closures()
        finish()
    except SystemExit as end:
        if end.code not in (None, 0):
            _fail(launcher, f"SystemExit: {end.code}", end)
        finish()
        launcher.send(Report("", "own", time.time()))
    except BaseException as error:
        _fail(launcher, traceback.format_exc(), error)
    else:
        launcher.send(Report("", "own", time.time(), *_pickled(result)))
    _leave()


def _pickled(result: object) -> tuple[bytes | None, str]:
    """A function's result as the launcher gets it, or None and why it cannot be pickled.

    Pickled here rather than by the pipe: the pipe would send tensors as references to memory of this process, which
    may end before the launcher reads them, and ``launch()``, which needs no results, would have to read them.
    """
    try:
        return pickle.dumps(result), ""
    except Exception as error:  # whatever a class's own pickling raises
        return None, f"{type(error).__name__}: {error}"


_attended: Final = Once()


def attend() -> None:
    """Report the failures of a process that our launcher did not start, until the process exits.

    Installs a ``sys.excepthook`` and an exit handler. Later calls do nothing.
    """
    if _attended.done:
        return
    if session.begin() is None:
        flight_recorder.start(None, 0, 1, lambda: None)
        return
    _attended.begin()
    failures: list[str] = []
    previous_hook = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        consequence = distributed.is_lost_connection(error)
        flight_report = flight_recorder.failed(_reason(error, text), error, own=not consequence)
        failures.append(text)
        if consequence:
            failure_reports.follow()
            with _sigterm_delayed():
                previous_hook(*_with_culprit(error, trace))
        else:
            previous_hook(kind, error, trace)
            _publish_failure(error, text)
        if flight_report:
            sys.stderr.write(f"xla-dist: {flight_report.strip()}\n")

    def leave() -> None:
        if not failures:
            try:
                training.wait_for_closures()
                finish()
                _leave()
            except Exception as error:  # at exit, Python would show it and exit with status 0
                report(type(error), error, error.__traceback__)
                failure_reports.leave(1)
            return
        _leave()

    sys.excepthook = report
    atexit.register(leave)


def _with_culprit(
    error: BaseException, trace: TracebackType | None
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """The exception to show for a collective that failed because of another process, and its traceback.

    A PeerFailedError that names the process that died or failed, raised at this process's line; the error itself
    if no such process is known within the failure timeout.
    """
    current = session.begin()
    if current is None or current.watchdog is None:
        return type(error), error, trace
    text = current.watchdog.culprit(flags.FAILURE_TIMEOUT.get() + _PUBLISH_SECONDS)
    if text is None:
        return type(error), error, trace
    peer_failed = PeerFailedError(text)
    peer_failed.__cause__ = error.with_traceback(None)
    return PeerFailedError, peer_failed, trace


@contextlib.contextmanager
def _sigterm_delayed() -> Iterator[None]:
    """A block in which SIGTERM has no effect until the block ends.

    torchrun sends SIGTERM as soon as one process has failed, but this one has yet to say why it fails.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        if received:
            signal.raise_signal(signal.SIGTERM)


def finish() -> None:
    """Wait for the device's pending work, and then until all other processes are done as well.

    If a process left earlier, the others' collectives with it would fail.
    """
    if runtime.started():
        runtime.wait()
    current = session.begin()
    if current is None or current.world == 1:
        return
    failure_reports.publish_done()
    ordinals = set(range(current.world))
    with BoundedWait("the end of the job", current.ordinal, endless=True) as bounded_wait:
        while missing := sorted(ordinals - failure_reports.finished()):
            bounded_wait.wait(missing)
    if current.watchdog is not None:
        current.watchdog.stop()


def _leave() -> None:
    """Disconnect from the job's coordinator, and wait for the watchdog's threads, which query it."""
    current = session.begin() if jobs.connection() is not None else None
    watchdog = current.watchdog if current is not None else None
    if watchdog is not None:
        watchdog.stop()
    jobs.disconnect()
    if watchdog is not None:
        watchdog.wait_for_threads(_THREADS_SECONDS)


def _fail(launcher: _Launcher, text: str, error: BaseException) -> None:
    """Report ``error`` to the launcher and to the other processes, and exit with status 1.

    ``text`` is the error's traceback.
    """
    consequence = distributed.is_lost_connection(error)
    current = session.begin() if jobs.connection() is not None else None
    kind = "consequence" if consequence else "own"
    difference = _difference(current) if consequence and current is not None else None
    if difference is not None or isinstance(error, Difference):
        text, kind = difference or text, "difference"
    flight_report = flight_recorder.failed(_reason(error, text), error, own=not consequence)
    path = flight_report.strip().partition(flight_recorder.MSG_REPORT.format(path=""))[2]
    launcher.send(Report(text + flight_report, kind, time.time(), flight=path))
    if current is not None and current.watchdog is not None:
        current.watchdog.stop()
        if kind == "consequence":
            failure_reports.follow()
        else:
            _publish_failure(error, text)
    failure_reports.leave(1)


def _reason(error: BaseException, text: str) -> str:
    """The flight report's reason: the traceback ``text``, but one line for Ctrl-C.

    The report of an interrupted process contains its stack in any case.
    """
    return MSG_INTERRUPTED if isinstance(error, KeyboardInterrupt) else text


def _publish_failure(error: BaseException, text: str) -> None:
    """Tell the other processes that this one ends because of an error of its own, or of Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        failure_reports.publish_interrupt()
    else:
        failure_reports.publish(text)


def _difference(current: session.Session) -> str | None:
    """The message if a collective failed because another process launched a different one, else None."""
    try:
        current.order_check.compare()
    except Difference as difference:
        return str(difference)
    except RuntimeError:
        return None  # the coordinator has gone as well
    return None
