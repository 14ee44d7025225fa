"""How a process of a job begins and ends: it joins the others, and reports how it went.

A launched process is wrapped around the user's function. One that torchrun, or a user on each host,
has started is looked after from the moment its client starts until the interpreter exits.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from xla_core.extension_api import distributed, jobs, runtime, training
from xla_core.extension_api.jobs import Job
from xla_core.support import flags
from xla_core.support.once import Once
from xla_dist.job_health import failure_reports, flight_recorder, thread_states
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.job_health.collective_order import Difference
from xla_dist.job_health.launch_log import LaunchLog
from xla_dist.processes import session

_LAST_WORDS_SECONDS: Final = 2.0
MSG_INTERRUPTED: Final = "interrupted (KeyboardInterrupt)"
_THREADS_SECONDS: Final = 20.0
"""So long an answer of the coordinator's is waited for, which is lost already: a busy machine takes its time."""


class PeerFailedError(RuntimeError):
    """A collective broke, because another process of the job failed or died; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """How a process ended: its traceback (empty: well), which kind of end that is, and when.

    ``kind`` is ``"own"``, ``"consequence"`` of another process's end, or a ``"difference"`` between
    the processes' programs. ``flight`` is the path of the flight report, if it has written one.
    """

    traceback: str
    kind: str
    when: float
    result: Any = None
    flight: str = ""


def run_child(
    job: Job,
    pipe: object,
    environment: dict[str, str],
    fn: Callable[..., object],
    args: Sequence[object],
    ledger: LaunchLog | None = None,
    environment_is_whole: bool = False,
) -> None:
    """Call ``fn(ordinal, *args)`` as one of the job's processes; the entry of each of them.

    ``environment_is_whole``: what is not in ``environment`` is not set here either.
    """
    own = os.environ
    for name in set(own).difference(environment) if environment_is_whole else ():
        del own[name]
    own.update(environment)
    _attended.begin()
    failure_reports.follow_launcher()
    try:
        thread_states.runtime_starts()
        jobs.connect(job)
        thread_states.runtime_started()
        current = session.begin()
        if current is not None and current.watchdog is not None:
            current.agreement.ledger = ledger
            current.watchdog.on_end = lambda text, kind: _send(
                pipe, Report(text, kind, time.time())
            )
        result = fn(job.index, *args)
        training.wait_for_closures()
        finish()
    except SystemExit as end:
        if end.code not in (None, 0):
            _fail(pipe, f"SystemExit: {end.code}", end)
        finish()
        _send(pipe, Report("", "own", time.time()))
    except BaseException as error:
        _fail(pipe, traceback.format_exc(), error)
    else:
        _send(pipe, Report("", "own", time.time(), result))
    _leave()


_attended: Final = Once()


def attend() -> None:
    """Look after a process that no launcher of ours has started, until it exits; once."""
    if _attended.done:
        return
    if session.begin() is None:
        flight_recorder.start(None, 0, 1, lambda: None)
        return
    _attended.begin()
    failed: list[str] = []
    shown = sys.excepthook

    def report(kind: Any, error: Any, trace: Any) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        consequence = distributed.is_lost_connection(error)
        written = flight_recorder.failed(_reason(error, text), error, own=not consequence)
        failed.append(text)
        if consequence:
            failure_reports.follow()
            with _until_said():
                shown(*_named(error, trace))
        else:
            shown(kind, error, trace)
            _tell(error, text)
        if written:
            sys.stderr.write(f"xla-dist: {written.strip()}\n")

    def leave() -> None:
        if not failed:
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


def _named(error: BaseException, trace: object) -> tuple[type[BaseException], BaseException, Any]:
    """What to show of a collective that broke: who has died or failed, and at which line this one was."""
    current = session.begin()
    if current is None or current.watchdog is None:
        return type(error), error, trace
    text = current.watchdog.culprit(flags.FAILURE_TIMEOUT.get() + _LAST_WORDS_SECONDS)
    if text is None:
        return type(error), error, trace
    lost = PeerFailedError(text)
    lost.__cause__ = error.with_traceback(None)
    return PeerFailedError, lost, trace


@contextlib.contextmanager
def _until_said() -> Iterator[None]:
    """Put off the end that torchrun asks for, once one process has ended: this one has a word to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if asked:
            signal.raise_signal(signal.SIGTERM)


def finish() -> None:
    """Finish what runs on the device, and wait until all others have come as far.

    A process that left earlier would take its end of their collectives with it.
    """
    if runtime.started():
        runtime.wait()
    current = session.begin()
    if current is None or current.world == 1:
        return
    failure_reports.publish_done()
    everyone = set(range(current.world))
    with BoundedWait("the end of the job", current.ordinal, endless=True) as patience:
        while missing := sorted(everyone - failure_reports.finished()):
            patience.wait(missing)
    if current.watchdog is not None:
        current.watchdog.stop()


def _leave() -> None:
    """Leave the job, and wait for the threads that ask its coordinator."""
    current = session.begin() if jobs.connection() is not None else None
    watchdog = current.watchdog if current is not None else None
    if watchdog is not None:
        watchdog.stop()
    jobs.disconnect()
    if watchdog is not None:
        watchdog.wait_for_threads(_THREADS_SECONDS)


def _fail(pipe: object, text: str, error: BaseException) -> None:
    """Report to the launcher and to the other processes, and exit."""
    consequence = distributed.is_lost_connection(error)
    current = session.begin() if jobs.connection() is not None else None
    kind = "consequence" if consequence else "own"
    difference = _difference(current) if consequence and current is not None else None
    if difference is not None or isinstance(error, Difference):
        text, kind = difference or text, "difference"
    written = flight_recorder.failed(_reason(error, text), error, own=not consequence)
    path = written.strip().partition(flight_recorder.MSG_REPORT.format(path=""))[2]
    _send(pipe, Report(text + written, kind, time.time(), flight=path))
    if current is not None and current.watchdog is not None:
        current.watchdog.stop()
        if kind == "consequence":
            failure_reports.follow()
        else:
            _tell(error, text)
    failure_reports.leave(1)


def _reason(error: BaseException, text: str) -> str:
    """Why there is a flight report: which has the stack of an interrupted process anyway."""
    return MSG_INTERRUPTED if isinstance(error, KeyboardInterrupt) else text


def _tell(error: BaseException, text: str) -> None:
    """Tell the others that this process ends by an error of its own, or by Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        failure_reports.publish_interrupt()
    else:
        failure_reports.publish(text)


def _difference(current: session.Session) -> str | None:
    """Whether a collective broke because the other side ran another one, as far as it has shown it."""
    try:
        current.agreement.look()
    except Difference as difference:
        return str(difference)
    except RuntimeError:
        return None  # the coordinator is gone as well
    return None


def _send(pipe: Any, report: Report) -> None:
    try:
        pipe.send(report)
    except (OSError, ValueError):
        return  # the launcher is gone; the watchdog's business
    except Exception:  # a result that cannot be pickled is no failure: launch() returns nothing
        pipe.send(dataclasses.replace(report, result=None))
