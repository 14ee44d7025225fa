"""Makes the processes of a job notice that one of them has failed, and end together.

A process that fails publishes its traceback. A killed process stops giving signs of life, and processes on the same
host notice even earlier that it is missing in /proc. A watchdog thread in every process checks this twice a second,
and ends its process with a message that names the culprit, because the main thread may be waiting inside a
collective that never completes, where no exception reaches it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection as pipes
from typing import Final, NamedTuple, NoReturn

from xla_core.extension_api import jobs
from xla_core.support import flags
from xla_dist.job_health import flight_recorder, peer_queries
from xla_dist.job_health.collective_order import Difference, OrderCheck
from xla_dist.job_health.heartbeats import Heartbeats
from xla_dist.job_health.local_processes import LocalProcesses, introduce
from xla_dist.job_health.stall_detector import StallDetector
from xla_dist.job_health.thread_states import ThreadWatch
from xla_dist.settings import STUCK_TIMEOUT

logger = logging.getLogger(__name__)

FAILURE_FOLDER: Final = "xla/failure"
DONE_FOLDER: Final = "xla/done"
FOLLOWERS_FOLDER: Final = "xla/followers"
INTERRUPTED_FOLDER: Final = "xla/interrupted"
STATUS_FOLDER: Final = "xla/status"
TICK_SECONDS: Final = 0.5
INTERRUPTED_SECONDS: Final = 5.0
"""Ctrl-C reaches all processes at once: each has this long to save its state and end by itself."""
_BROKEN_PAUSE: Final = 0.05
"""The pause between checks of a process that is about to end, and wants to say why."""

MSG_FAILED: Final = "ordinal {ordinal} ends, because ordinal {culprit} failed:\n{text}"
MSG_DEAD: Final = "ordinal {culprit} of the job has died without a word (killed, or out of memory): {how}. {doing}"
MSG_INTERRUPTED: Final = (
    "ordinal {ordinal} ends, because ordinal {others} was interrupted (KeyboardInterrupt). {doing}"
)
MSG_SILENT: Final = "no sign of life for {seconds} s (XLA_DIST_FAILURE_TIMEOUT)"
MSG_GONE: Final = "its process has ended"
MSG_LEFT: Final = "ordinal {ordinals} has ended"
MSG_FROZEN: Final = (
    "ordinal {culprit} of the job is frozen: for {seconds:.0f} s its process has been stopped, as by "
    "SIGSTOP (half of XLA_DIST_FAILURE_TIMEOUT). {doing}"
)
MSG_COORDINATOR: Final = (
    "the job's coordinator at {address} is gone, and with it {who}: {error}. {doing}"
)
MSG_LOCKED: Final = (
    "ordinal {me} never arrives at {what}, where ordinal {other} waits for it: for {seconds:.0f} s "
    "(XLA_DIST_STUCK_TIMEOUT) all its threads have waited for locks that none of them releases. Its "
    "main thread is at\n{stack}"
)
MSG_ORPHAN: Final = "the launcher of this job has ended"


@dataclasses.dataclass(slots=True)
class Waiting:
    """The call in which the main thread waits, and the replicas it waits for: published, and shown in reports."""

    what: str
    missing: tuple[int, ...] = ()
    since: float = dataclasses.field(default_factory=time.monotonic)


class _Cause(NamedTuple):
    """Why this process ends; whether it is the one that found it, and so tells the others."""

    text: str
    by_this: bool = False


class _State:
    watchdog: Watchdog | None = None
    waiting: Waiting | None = None
    shown: bytes = b"null"


class Watchdog(threading.Thread):
    """Watches the other processes, and compares ``order_check`` with theirs."""

    def __init__(self, connection: jobs.Connection, order_check: OrderCheck) -> None:
        super().__init__(name="xla-dist-watchdog", daemon=True)
        self.connection = connection
        self.order_check = order_check
        self.threads = ThreadWatch()
        self.local_processes = LocalProcesses(connection.job.count)
        self.heartbeats = Heartbeats(
            connection.job.count, connection.client.get_live_nodes, TICK_SECONDS
        )
        self.on_end: Callable[[str, str], None] = lambda text, kind: None
        """Called with the message and the kind of end (``child_process.Report``)."""
        self._answered = False
        self._stopped = threading.Event()
        self._lost_since: float | None = None
        self._interrupted_since: float | None = None
        job = connection.job
        self.recorder = flight_recorder.start(
            order_check, job.index, job.count, lambda: _State.waiting
        )
        self.stalls = StallDetector(order_check, self.recorder.slow)

    def run(self) -> None:
        """Check repeatedly until ``stop()``."""
        self.heartbeats.start()
        while not self._stopped.wait(TICK_SECONDS):
            cause = self._look()
            if cause is not None and not self._stopped.is_set():
                self._end(cause.text, "consequence", cause.by_this)

    def stop(self) -> None:
        """Stop checking, because the job is over."""
        self._stopped.set()
        self.heartbeats.stop()

    def wait_for_threads(self, seconds: float) -> None:
        """Wait at most ``seconds`` for its threads to end, after ``stop()`` and the end of the connection.

        A thread that returned from a call to the coordinator while Python shuts down would abort the process.
        """
        until = time.monotonic() + seconds
        for thread in (self, self.heartbeats):
            if thread.is_alive():
                thread.join(max(until - time.monotonic(), 0.0))

    def culprit(self, seconds: float) -> str | None:
        """The message about a process that has failed or died; None if none is found within ``seconds``.

        For a process that ends by itself because a collective broke; the watchdog stops checking.
        """
        self._stopped.set()
        self.join(seconds)
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the coordinator is also gone
            while time.monotonic() < until:
                text = self._failure() or self._interrupted(0.0) or self._silent()
                if text is not None:
                    return text
                time.sleep(_BROKEN_PAUSE)
        return None

    def _end(self, text: str, kind: str, tell: bool = False) -> None:
        """End this process now, whatever its main thread is doing; writes ``text`` to stderr.

        ``tell`` (default: False) publishes it as a failure that ends the others as well.
        """
        self._stopped.set()
        if kind == "consequence":
            follow()
        tells = functools.partial(publish, text) if tell else None
        report = text + flight_recorder.failed(text, tells=tells)
        _end(report, lambda: self.on_end(report, kind))

    def _look(self) -> _Cause | None:
        try:
            self._answer()
            text = self._failure() or self._interrupted(INTERRUPTED_SECONDS) or self._silent()
            if text is not None:
                return _Cause(text)
            text = self._difference() or self.recorder.look()
            return _Cause(text, by_this=True) if text is not None else None
        except Difference as difference:
            self._end(str(difference), "difference", tell=True)
            return None
        except RuntimeError as error:
            text = self._unreachable(error)
            return _Cause(text) if text is not None else None
        except Exception:  # a job without a watchdog could hang, so go on checking
            logger.exception(
                "xla-dist: the watchdog of ordinal %d failed", self.order_check.log.ordinal
            )
            return None

    def _failure(self) -> str | None:
        self._lost_since = None
        # the log before the status, so that a reader of this process's status finds in its log what it
        # launched before
        self.order_check.show()
        show_status()
        for name, data in sorted(jobs.published(FAILURE_FOLDER).items()):
            if int(name) != self.connection.job.index:
                return MSG_FAILED.format(
                    ordinal=self.connection.job.index, culprit=name, text=data.decode()
                )
        return None

    def _interrupted(self, patience: float) -> str | None:
        """The message about interrupted processes, ``patience`` seconds after this was first seen."""
        me = self.connection.job.index
        others = sorted(set(map(int, jobs.published(INTERRUPTED_FOLDER))) - {me})
        if not others:
            return None
        now = time.monotonic()
        self._interrupted_since = self._interrupted_since or now
        if now - self._interrupted_since < patience:
            return None
        names = ", ".join(map(str, others))
        return MSG_INTERRUPTED.format(ordinal=me, others=names, doing=self._doing())

    def _silent(self) -> str | None:
        """The message about a process that was stopped, or has disappeared without a report."""
        alive = self.heartbeats.alive
        self.local_processes.look()
        # read after that: a process that leaves is alive until it has published so
        done = {**jobs.published(DONE_FOLDER), **jobs.published(INTERRUPTED_FOLDER)}
        seconds = flags.FAILURE_TIMEOUT.get()
        for index, frozen in self.local_processes.frozen().items():
            if frozen >= seconds / 2 and str(index) not in done:
                return MSG_FROZEN.format(culprit=index, seconds=frozen, doing=self._doing())
        gone_now = self.local_processes.gone()
        if any(str(index) not in done for index in gone_now):
            # immediately, because a launcher may end this process before the next check
            flight_recorder.failed(MSG_LEFT.format(ordinals=", ".join(map(str, gone_now))))
        for index, gone in gone_now.items():
            # at the second look: between the two, its last words were looked for
            if gone >= TICK_SECONDS and str(index) not in {**done, **followers()}:
                return MSG_DEAD.format(culprit=index, how=MSG_GONE, doing=self._doing())
        for index in range(self.connection.job.count):
            if index not in alive and str(index) not in done:
                how = MSG_SILENT.format(seconds=seconds)
                return MSG_DEAD.format(culprit=index, how=how, doing=self._doing())
        return None

    def _difference(self) -> str | None:
        done, waiting_for_this = finished(), wait_for(self.order_check.log.ordinal)
        self.order_check.compare()
        return self.stalls.look(done, waiting_for_this)

    def _answer(self) -> None:
        """Publish where this process is, if others wait for it; end it if it can never arrive."""
        me = self.order_check.log.ordinal
        askers = peer_queries.asked(me)
        if not askers:
            self.threads.forget()
            if self._answered:
                peer_queries.withdraw_answer(me)
            self._answered = False
            return
        condition = self.threads.look()
        peer_queries.answer(me, condition)
        self._answered = True
        if condition.locked > STUCK_TIMEOUT.get():
            other, what = min(askers.items())
            text = MSG_LOCKED.format(
                me=me, other=other, what=what, seconds=condition.locked, stack=condition.stack
            )
            self._end(text, "own", tell=True)

    def _unreachable(self, error: Exception) -> str | None:
        """The message about a coordinator that does not answer; None the first time, which may be chance."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        if now - self._lost_since < 2 * TICK_SECONDS:
            return None
        job = self.connection.job
        who = "the launcher" if job.served else "process 0"
        first = str(error).splitlines()[0]
        return MSG_COORDINATOR.format(
            address=job.address, who=who, error=first, doing=self._doing()
        )

    def _doing(self) -> str:
        waiting = _State.waiting
        if waiting is not None:
            return f"This process waited at {waiting.what}"
        return f"This process last launched: {self.order_check.last()}"


def _end(text: str, report: Callable[[], None]) -> NoReturn:
    sys.stdout.flush()
    print(f"xla-dist: {text}", file=sys.stderr, flush=True)  # noqa: T201 - last words
    report()
    leave(jobs.EXIT_CODE)


def leave(status: int) -> NoReturn:
    """End this process and its own children (workers of a loader) now.

    This skips the interpreter's shutdown, which would wait for programs that will never finish.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def follow_launcher() -> None:
    """End this process when its launcher ends, even while it is still waiting for the other processes."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        threading.Thread(target=_follow, args=(launcher,), name="xla-launcher", daemon=True).start()


def _follow(launcher: multiprocessing.process.BaseProcess) -> None:
    pipes.wait([launcher.sentinel])
    _end(MSG_ORPHAN + flight_recorder.failed(MSG_ORPHAN), lambda: None)


def watch(order_check: OrderCheck) -> Watchdog | None:
    """Start the watchdog, if it is not running; None for a process that is alone."""
    connection = jobs.connection()
    if connection is None or connection.job.count < 2:
        return None
    if _State.watchdog is None:
        introduce()
        _State.watchdog = Watchdog(connection, order_check)
        _State.watchdog.start()
    return _State.watchdog


def watchdog() -> Watchdog | None:
    """The running watchdog."""
    return _State.watchdog


def publish(text: str) -> None:
    """Publish that and why this process has failed; the others end within a second.

    They find it out themselves if the coordinator is gone.
    """
    connection = jobs.connection()
    if connection is not None:
        with contextlib.suppress(RuntimeError):
            jobs.publish(f"{FAILURE_FOLDER}/{connection.job.index}", text.encode())


def publish_interrupt() -> None:
    """Publish that this process ends by Ctrl-C; the others end soon as well, and need no traceback."""
    connection = jobs.connection()
    if connection is not None:
        # an interrupted launcher that was the coordinator may be gone
        with contextlib.suppress(RuntimeError):
            jobs.publish(f"{INTERRUPTED_FOLDER}/{connection.job.index}", b"")


def follow() -> None:
    """Publish that this process ends because of another one, so that it is not named as the culprit."""
    connection = jobs.connection()
    if connection is not None:
        with contextlib.suppress(RuntimeError):  # it may be the coordinator that is gone
            jobs.publish(f"{FOLLOWERS_FOLDER}/{connection.job.index}", b"")


def followers() -> dict[str, bytes]:
    """The processes, by ordinal, that have ended because of another one."""
    return jobs.published(FOLLOWERS_FOLDER)


def publish_done() -> None:
    """Publish that this process has finished successfully, so that its silence does not count as a failure."""
    connection = jobs.connection()
    if connection is not None:
        if _State.watchdog is not None:
            _State.watchdog.order_check.show()
            _State.watchdog.recorder.show(finished=True)
        jobs.publish(f"{DONE_FOLDER}/{connection.job.index}", b"")


def finished() -> set[int]:
    """The processes that have finished successfully."""
    return {int(name) for name in jobs.published(DONE_FOLDER)}


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Waiting]:
    """A block in which the main thread waits at ``what``; the caller fills in ``missing``."""
    _State.waiting = state = Waiting(what)
    try:
        yield state
    finally:
        _State.waiting = None
        if _State.shown != b"null":
            # immediately: the watchdog may be delayed while something keeps the interpreter busy, and
            # the others would believe that this process still waits
            show_status()


def show_status() -> None:
    """Publish where this process waits, if that has changed."""
    connection, now = jobs.connection(), _State.waiting
    status = json.dumps((now.what, now.missing) if now else None).encode()
    if connection is not None and status != _State.shown:
        _State.shown = status
        jobs.publish(f"{STATUS_FOLDER}/{connection.job.index}", status)


def everyone_waiting() -> dict[int, Waiting]:
    """The waits of all replicas whose main threads wait for others, by ordinal."""
    statuses = {int(n): json.loads(data) for n, data in jobs.published(STATUS_FOLDER).items()}
    return {n: Waiting(s[0], tuple(s[1])) for n, s in statuses.items() if s}


def wait_for(ordinal: int) -> dict[int, str]:
    """The replicas whose main threads wait for replica ``ordinal``, and where they wait."""
    return {n: w.what for n, w in everyone_waiting().items() if ordinal in w.missing}
