"""The flight recorder of a job: who writes a report of it when, and what each process tells the others before.

Every process keeps a ring of what it did last (``xla_core.support.flight_ring``). The watchdog shows
the newest part of it to the others twice a second, so that a process that dies is in the report,
and checks whether one is requested. Each process writes its own part; the last one merges them.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import JsonObject
from xla_core.extension_api import jobs
from xla_core.support import flight_files, flight_report, flight_ring
from xla_dist.job_health import flight_snapshot, thread_states, witness
from xla_dist.job_health.collective_order import OrderCheck
from xla_dist.job_health.flight_snapshot import Facts, WaitingCall
from xla_dist.settings import STEP_LIMIT, STEP_LIMIT_ENDS, WARN_AFTER

logger = logging.getLogger(__name__)

SIGNAL: Final = signal.SIGUSR2
"""A process that gets this writes a report of the whole job."""
END: Final = witness.END
_NAME: Final = "xla/flight/job"
_WANTED: Final = "xla/flight/wanted"
_LAST: Final = "xla/flight/last"
LEAST_SECONDS: Final = 5.0
"""A step that takes less is no hang, however long the others take."""
_NO_SIGNAL: Final = 0
"""In the pipe of signals: the process ends."""
_LATER_SECONDS: Final = 1.0
"""So much later than process 0 the others find a step long: one report is enough."""
_STRAGGLER_SECONDS: Final = 10.0
_SLOW_PAUSE_SECONDS: Final = 60.0
"""Twice so long after a report of a long wait there may be the next, and twice as long after that one."""
_SAME_SECONDS: Final = 1.0
"""Signals that come so soon after each other are one."""
_WITNESS_SECONDS: Final = 3.0
_LAST_WORDS_SECONDS: Final = 3.0
"""A thread that ends the process lets another that does so write its report for this long."""

MSG_LONG: Final = (
    "ordinal {me}: step {step} has taken {seconds:.1f} s so far, the usual one {usual:.3f} s "
    "(XLA_DIST_STEP_LIMIT is {limit:g})"
)
MSG_MEETING: Final = "ordinal {me} has waited for others in {what} for {seconds:.0f} s"
MSG_REPORT: Final = "flight report: {path}"
MSG_ASKED: Final = "asked for at process {pid}"
MSG_UNWRITABLE: Final = "xla-dist: no flight report could be written: %s"


class _State:
    recorder: Recorder | None = None


class Recorder:
    """What the watchdog does for reports: ``order_check`` has the collectives of replica ``ordinal``.

    ``waiting`` tells what the main thread waits at. For a process that is alone the count is 1.
    """

    def __init__(
        self,
        order_check: OrderCheck | None,
        ordinal: int,
        count: int,
        waiting: Callable[[], WaitingCall | None],
    ) -> None:
        self.order_check = order_check
        self.ordinal = ordinal
        self.count = count
        self._waiting = waiting
        self._asked = threading.Event()
        self._over = self._spoken = False
        self._last_words = concurrent.futures.Future[Path | None]()
        """The page that has the error that ends this process; another thread may also be ending it."""
        self._dumped: set[str] = set()
        self._dumped_at = time.monotonic()
        self._shown: object = None
        self._lock = threading.Lock()
        self._own_name = f"{time.strftime('%Y-%m-%dT%H%M%S')}-{os.getpid()}"
        self._name = self._own_name if count == 1 else ""
        self._limits = StepLimit(ordinal)
        self._meetings = MeetingLimit(ordinal)
        self._slow_pause, self._next_slow = _SLOW_PAUSE_SECONDS, 0.0
        self._next_straggler = time.monotonic() + _STRAGGLER_SECONDS
        self._named: set[str] = set()
        if order_check is not None:
            order_check.on_unusual = self.show
        if count > 1 and ordinal == 0:
            jobs.publish(_NAME, self._own_name.encode())
        met = jobs.connection()
        first_here = count > 1 and met is not None and met.job.local_index == 0
        self._witness = witness.Witness(met.job.address) if met and first_here else None

    # -- twice a second -------------------------------------------------------------------------

    def look(self) -> str | None:
        """Show what this process did last, and write what is wanted; why the job is to end, or None."""
        self.show()
        ends = None if self._over else self._look_at_step()
        if not self._over and self._waiting() is None:  # else it says so itself, and for whom
            long_meeting = self._meetings.look()
            if long_meeting is not None:
                self.slow(*long_meeting)
        if self._asked.is_set():
            self._asked.clear()
            text = MSG_ASKED.format(pid=os.getpid())
            self.want("asked", text)
        data = jobs.lookup(_WANTED)
        if data is not None:
            occasion, reason = json.loads(data)
            self.dump(occasion, Facts(reason))
        self._look_for_stragglers()
        return ends

    def show(self, finished: bool = False) -> None:
        """Tell the others what this process did last, if that is new."""
        self._over = finished = self._over or finished
        newest = flight_ring.newest()
        place = thread_states.main_place()
        seen = (id(newest), newest[2] if newest is not None else 0, place, finished)
        if seen == self._shown:
            return
        self._shown = seen
        facts = Facts(waiting=self._waiting(), finished=finished)
        last = flight_snapshot.take_brief(self.order_check, self.ordinal, self.count, facts)
        self._keep(last)
        jobs.publish(f"{_LAST}/{self.ordinal}", zlib.compress(json.dumps(last).encode(), 1))

    def _keep(self, last: dict[str, object]) -> None:
        """Leave on this host what the runtime cannot take along, should it abort the process."""
        if END in self._dumped:
            return  # a report has it all
        with contextlib.suppress(OSError):  # a report will say so
            if last["finished"]:
                flight_files.forget(self.name(), self.ordinal)
            else:
                flight_files.keep(self.name(), last)
                if END in self._dumped:  # by another thread, meanwhile
                    flight_files.forget(self.name(), self.ordinal)
                if self._witness is not None and self._name:
                    self._witness.name_job(self._name)

    def want(self, kind: str, reason: str) -> None:
        """Have all processes write a report, within their next look."""
        if self.count == 1:
            self.dump(_occasion(kind), Facts(reason))
        else:
            jobs.publish(_WANTED, json.dumps([_occasion(kind), reason]).encode())

    def slow(self, text: str, seconds: float) -> None:
        """Warn of a wait that has lasted so long, and have a report of the job written, if there is none of it.

        There are the fewer of such reports the longer the job lasts: waits may be usual, as for an evaluation.
        """
        now = time.monotonic()
        if now - self._dumped_at > seconds and now >= self._next_slow:
            self._slow_pause *= 2
            self._next_slow = now + self._slow_pause
            self.want("long-wait", text)
            path = flight_files.folder() / self.name()
            text = f"{text}; {MSG_REPORT.format(path=path)}"
        logger.warning("%s", text)

    def _look_at_step(self) -> str | None:
        text = self._limits.look(time.monotonic() - self._dumped_at)
        if text is None:
            return None
        self.want("long-step", text)
        path = flight_files.folder() / self.name()
        logger.warning("%s; %s", text, MSG_REPORT.format(path=path))
        return text if STEP_LIMIT_ENDS.get() else None

    def _look_for_stragglers(self) -> None:
        """Warn of each process that all others wait for, once."""
        now = time.monotonic()
        if self.ordinal != 0 or now < self._next_straggler:
            return
        self._next_straggler = now + _STRAGGLER_SECONDS
        for line in self.stragglers():
            who = line.partition(" is ")[0]
            if who not in self._named:
                self._named.add(who)
                logger.warning("%s", line)

    def stragglers(self) -> list[str]:
        """A line for each process whose own part of a step is longer than that of the others."""
        times = {n: (one["steps"]["own"], one["steps"]["usual"]) for n, one in _last().items()}
        known = {n: t for n, t in times.items() if t[0] is not None}
        return list(flight_report.straggler_lines(known))

    # -- reports --------------------------------------------------------------------------------

    def ask(self) -> None:
        """Have a report of the job written, from any thread."""
        if self.count == 1:
            self.want("asked", MSG_ASKED.format(pid=os.getpid()))
        else:
            self._asked.set()

    def dump(self, occasion: str, facts: Facts) -> Path | None:
        """Write this process's part of a report, once for each occasion; the page's path, if there is one."""
        with self._lock:
            if occasion in self._dumped and occasion != END:
                return None
            # the words of the error that ends it are better
            spoken, self._spoken = self._spoken, self._spoken or facts.place is not None
            if not spoken:
                self._dumped.add(occasion)
                self._dumped_at = time.monotonic()
        if spoken and facts.place is None:
            return self._page_of_last_words() if occasion == END else None
        page = None
        try:
            page = self._write(occasion, facts)
        finally:
            if facts.place is not None and not self._last_words.done():
                self._last_words.set_result(page)
        return page

    def _page_of_last_words(self) -> Path | None:
        """The page that another thread writes: who ends the process must let it, and names the same page."""
        with contextlib.suppress(TimeoutError):
            return self._last_words.result(_LAST_WORDS_SECONDS)
        return None

    def _write(self, occasion: str, facts: Facts) -> Path | None:
        snapshot = facts.snapshot or self.snapshot(facts)
        others: dict[int, dict[str, object]] = {}
        if self.count > 1:
            with contextlib.suppress(RuntimeError):  # the coordinator is gone
                others = _last()
        try:
            written = flight_files.write(self.name(), occasion, snapshot, others)
            if occasion == END:
                flight_files.forget(self.name(), self.ordinal)
            return written
        except OSError as error:
            logger.warning(MSG_UNWRITABLE, error)
            return None

    def snapshot(self, facts: Facts) -> JsonObject:
        """This process's part of a report."""
        facts.waiting = facts.waiting or self._waiting()
        if self.count > 1 and self.order_check is not None:
            with contextlib.suppress(RuntimeError):  # the coordinator is gone, or programs differ
                self.order_check.compare()  # what others have launched meanwhile
        return flight_snapshot.take(self.order_check, self.ordinal, self.count, facts)

    def name(self) -> str:
        """The job's name, which process 0 has given it."""
        if not self._name:
            with contextlib.suppress(RuntimeError):
                self._name = (jobs.lookup(_NAME) or b"").decode()
        met = jobs.connection()
        return self._name or (met.job.address.replace("/", "_") if met else self._own_name)


class StepLimit:
    """When a step takes too long: the limit is learned from the job's own steps.

    A long step that has ended after all (an evaluation, a checkpoint) is usual from then on.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._alarm: tuple[int, float] | None = None
        self._known = 0.0

    def look(self, reported: float) -> str | None:
        """What to say of the step that runs, once; None while all is well.

        ``reported`` is how many seconds ago there was a report: within the step, it is enough.
        """
        times = flight_ring.step_times()
        factor = STEP_LIMIT.get()
        if self._alarm is not None:
            step, seconds = self._alarm
            if times.ended == step:
                self._alarm = (step, times.since)
                return None
            self._known, self._alarm = max(self._known, 2 * seconds), None
        if times.usual is None or not factor:
            return None
        limit = max(factor * times.usual, LEAST_SECONDS, self._known)
        if times.since <= limit + (_LATER_SECONDS if self._ordinal else 0.0):
            return None
        self._alarm = (times.ended, times.since)
        if reported < times.since - factor * times.usual:
            return None
        return MSG_LONG.format(
            me=self._ordinal, step=times.ended + 1, seconds=times.since, usual=times.usual,
            limit=factor,
        )  # fmt: skip


class MeetingLimit:
    """When the host waits for others too long, in any thread: as for a checkpoint that all of them write.

    One that has ended after all is usual from then on.
    """

    def __init__(self, ordinal: int) -> None:
        self._later = _LATER_SECONDS if ordinal else 0.0
        self._ordinal = ordinal
        self._alarm: flight_ring.Record | None = None
        self._known = 0.0

    def look(self) -> tuple[str, float] | None:
        """What to say of the meeting that lasts longest, once, and its seconds; None while all is well."""
        if self._alarm is not None:
            if self._alarm[2] == flight_ring.RUNNING:
                return None
            self._known, self._alarm = max(self._known, 2e-9 * self._alarm[2]), None
        record = flight_ring.oldest_running(flight_ring.MEET)
        if record is None:
            return None
        seconds = (time.perf_counter_ns() - record[1]) / 1e9
        if seconds <= max(WARN_AFTER.get(), self._known) + self._later:
            return None
        self._alarm = record
        return MSG_MEETING.format(me=self._ordinal, what=record[4], seconds=seconds), seconds


def _occasion(kind: str) -> str:
    return f"{kind}-{time.strftime('%H%M%S')}"


def _last() -> dict[int, JsonObject]:
    """What all processes have shown last, by ordinal."""
    snapshots = jobs.published(_LAST)
    return {int(name): json.loads(zlib.decompress(data)) for name, data in snapshots.items()}


def start(
    order_check: OrderCheck | None,
    ordinal: int,
    count: int,
    waiting: Callable[[], WaitingCall | None],
) -> Recorder:
    """This process's recorder, made once; from now on a signal asks for a report."""
    if _State.recorder is None:
        _State.recorder = Recorder(order_check, ordinal, count, waiting)
        _listen(_State.recorder)
    return _State.recorder


def current() -> Recorder | None:
    """This process's recorder, or None."""
    return _State.recorder


def slow(text: str, seconds: float) -> None:
    """Warn of a wait for others that has lasted so long; the report of it is named."""
    if _State.recorder is not None:
        _State.recorder.slow(text, seconds)
    else:
        logger.warning("%s", text)


def failed(
    text: str,
    error: BaseException | None = None,
    own: bool = True,
    tells: Callable[[], None] | None = None,
) -> str:
    """Write the report of this process's end; the line that names its path, to go with ``text``, or nothing.

    ``error`` is what ends it, unless the watchdog does; ``own`` is false for a collective that broke. ``tells``
    (default: nothing) tells the other processes. It is called after the look at this process, whose wait breaks off
    when the one it waits for ends, and before the report is written: a disk may not answer.
    """
    recorder = _State.recorder
    facts = Facts(text)
    if error is not None:
        facts.raised(error, own)
    if tells is not None:
        try:
            if recorder is not None:
                facts.snapshot = recorder.snapshot(facts)
        finally:
            tells()
    if recorder is None:
        return ""
    path = recorder.dump(END, facts)
    return _line(path) if path is not None else ""


def _line(path: Path) -> str:
    return f"\n{MSG_REPORT.format(path=path)}"


def report_of(first: int, since: float) -> str:
    """The line that names the report of the end of a job, whose ordinal 0 is process ``first``, or nothing.

    For its launcher, whom a process that was killed has told of none. ``since`` is when the job began
    (``time.time()``): the number of a process comes again. Where processes ended without a word, their witness
    writes the report once all are gone, which takes it a moment.
    """
    until = time.monotonic() + _WITNESS_SECONDS
    while True:
        jobs = [
            job for job in flight_files.folder().glob(f"*-{first}") if _changed_since(job, since)
        ]
        # before the pages: these files go once the page is there
        silent = any(any((job / flight_files.RUNNING).glob("[0-9]*.json")) for job in jobs)
        pages = [job / END / flight_files.PAGE for job in jobs]
        written = [page for page in pages if _changed_since(page, since)]
        if written or not silent or time.monotonic() > until:
            return "".join(map(_line, written))
        time.sleep(0.05)


def _changed_since(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime >= moment
    except OSError:  # it is not there, or has just gone
        return False


# -- the signal -----------------------------------------------------------------------------------


def _listen(recorder: Recorder) -> None:
    """Answer the signal from a thread of its own: the main thread may be inside the runtime.

    Python notes a signal in a pipe at once, and runs handlers in the main thread only. Whoever has a handler of
    this signal already keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if former != -1:  # another event loop already receives signals
        signal.set_wakeup_fd(former, warn_on_full_buffer=False)
    # for such a loop, also one that comes later; where there is none this says the same once more
    signal.signal(SIGNAL, lambda number, _frame: _wake(writer, number))
    arguments = (recorder, reader)
    thread = threading.Thread(
        target=_answer, args=arguments, name=thread_states.FLIGHT_THREAD, daemon=True
    )
    thread.start()
    atexit.register(_end, thread, writer)


def _end(thread: threading.Thread, writer: int) -> None:
    """Python ends: an answer that was begun is given, and would abort the process later."""
    if thread.is_alive():  # as it is not in the child of a fork
        _wake(writer, _NO_SIGNAL)
        thread.join()


def _wake(writer: int, number: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(writer, bytes([number]))


def _answer(recorder: Recorder, reader: int) -> None:
    answered = 0.0
    while _NO_SIGNAL not in (numbers := os.read(reader, 64)):
        if SIGNAL in numbers and time.monotonic() - answered > _SAME_SECONDS:
            answered = time.monotonic()
            try:
                recorder.ask()
            except Exception:
                logger.exception("xla-dist: the flight recorder failed")
