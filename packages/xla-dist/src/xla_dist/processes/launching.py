"""Starts the processes of a job on this host, looks after them, and reports what went wrong.

The launcher reserves a port, starts one process per device, and runs the coordinator, so that no
process of the job is special. As soon as one fails, the others are ended, and the launcher
raises what ``torch.multiprocessing`` raises, with the culprit's ordinal and traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection as pipes
from typing import Any, Final

import torch
import torch.distributed
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from xla_core.extension_api import plugins, runtime
from xla_core.extension_api.jobs import (
    COORDINATOR_VARIABLE,
    COUNT_VARIABLE,
    EXIT_CODE,
    INDEX_VARIABLE,
    LOCAL_COUNT_VARIABLE,
    LOCAL_INDEX_VARIABLE,
    SERVED_VARIABLE,
    Job,
    job_from_environment,
    serve,
    serve_apart,
)
from xla_core.support import flags
from xla_dist.job_health import flight_recorder
from xla_dist.job_health.failure_reports import INTERRUPTED_SECONDS
from xla_dist.job_health.launch_log import LaunchLog
from xla_dist.job_health.local_processes import is_frozen
from xla_dist.processes import restarts
from xla_dist.processes.child_process import Report, run_child
from xla_dist.processes.thread_replicas import run_threads
from xla_dist.settings import RESTART_COUNT

logger = logging.getLogger(__name__)

# After the first process has ended badly the others may still say why; then they are ended.
_GRACE_SECONDS: Final = 1.5
_KILL_SECONDS: Final = 2.0
# Ctrl-C goes to the processes as well, which may catch it to save what they have: one that waits for another
# in a collective is ended by its watchdog ``INTERRUPTED_SECONDS`` after that one has left.
_INTERRUPT_SECONDS: Final = 2 * INTERRUPTED_SECONDS
_QUIET_SECONDS: Final = 1.0

MSG_NPROCS: Final = (
    "Unsupported nprocs ({got}). Leave it out (or give 1, or {count}): the number of processes is the "
    "number of devices on this host; on the CPU set CPU_NUM_DEVICES"
)
MSG_STARTED: Final = (
    "this process has already used its xla devices; call launch() or spawn() before, and use "
    "devices only inside the function that they run"
)
MSG_SPMD: Final = (
    "launch() and spawn() start replicas, and SPMD mode has one program over all devices: call the "
    "function directly; on several hosts run the same command on each"
)
MSG_RAISED: Final = (
    "\n\n-- ordinal {ordinal} of {count} terminated with the following error:\n{text}"
)
MSG_SIGNAL: Final = (
    "ordinal {ordinal} of {count} (process {pid}) was killed by signal {name}{others}"
)
MSG_EXIT: Final = "ordinal {ordinal} of {count} (process {pid}) exited with status {code}{others}"
MSG_INTERRUPTED: Final = (
    "interrupted: the processes have %.0f s to end by themselves; Ctrl-C again ends them now"
)
MSG_WHERE: Final = "where the processes were when they were interrupted: %s"
MSG_OTHERS: Final = "; the other processes were ended"


@dataclasses.dataclass(slots=True)
class _Child:
    """One started process: what it reported, and when its end was seen."""

    ordinal: int
    process: Any
    pipe: Any
    report: Report | None = None
    ended: float | None = None
    stopped: bool = False

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.process.exitcode != 0 and not self.stopped


class Launch:
    """The running processes of one ``spawn``; the object that ``join=False`` gives."""

    def __init__(
        self,
        children: Sequence[_Child],
        count: int,
        release: Callable[[], None],
        arguments: Sequence[Any],
    ) -> None:
        self._children = list(children)
        self._count = count
        self._release = release
        # a lock among them would be gone before a process that starts slowly has found it
        self._arguments = arguments
        self._began = time.time()

    @property
    def processes(self) -> list[Any]:
        """The ``multiprocessing`` processes, by local index."""
        return [child.process for child in self._children]

    def pids(self) -> list[int]:
        """Their process ids."""
        return [int(child.process.pid) for child in self._children]

    def results(self) -> dict[int, Any]:
        """What the function returned, by ordinal, once joined."""
        return {c.ordinal: c.report.result for c in self._children if c.report is not None}

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for all processes; True when all have ended well, False when the time was over.

        When one fails the others are ended (after ``grace_period`` seconds, default 1.5). SIGTERM meanwhile is
        passed on to all, and this process ends (SystemExit) when they have. Raises
        ProcessRaisedException or ProcessExitedException for the one that failed first.
        """
        grace = _GRACE_SECONDS if grace_period is None else grace_period
        until = None if timeout is None else time.monotonic() + timeout
        with restarts.passing_on_termination(self.processes):
            return self._join(until, grace)

    def _join(self, until: float | None, grace: float) -> bool:
        try:
            while any(c.ended is None for c in self._children):
                left = 0.2 if until is None else min(0.2, until - time.monotonic())
                if left <= 0:
                    return False
                self._look(left)
                if any(c.failed for c in self._children):
                    self._end_others(grace)
        except KeyboardInterrupt:
            self._end_interrupted()
            raise
        except BaseException:
            self._stop(0.0)
            self._release()
            raise
        try:
            self._raise_first_failure()
        finally:
            self._release()
        return True

    def _look(self, seconds: float) -> None:
        """Take reports and ends, waiting up to ``seconds`` for the first."""
        running = [c for c in self._children if c.ended is None]
        pipes.wait([c.process.sentinel for c in running] + [c.pipe for c in running], seconds)
        for child in running:
            _receive(child)
            if not child.process.is_alive():
                child.process.join()
                _receive(child)
                child.ended = time.monotonic()

    def _end_others(self, grace: float) -> None:
        """Let the others say what they have to say, then end them; a frozen one has nothing to say."""
        until = time.monotonic() + grace
        while time.monotonic() < until and any(
            c.ended is None and not is_frozen(c.process.pid) for c in self._children
        ):
            self._look(0.1)
        self._stop(_KILL_SECONDS)

    def _end_interrupted(self) -> None:
        """Let the processes end, which Ctrl-C has reached as well; at once if it comes again."""
        began, announced = time.monotonic(), False
        try:
            while any(c.ended is None for c in self._children):
                waited = time.monotonic() - began
                if waited > _INTERRUPT_SECONDS:
                    break
                if waited > _QUIET_SECONDS and not announced:
                    announced = True
                    logger.warning(MSG_INTERRUPTED, _INTERRUPT_SECONDS)
                self._look(0.1)
            for path in sorted(self._flight_reports()):
                logger.warning(MSG_WHERE, path)
        finally:
            self._stop(0.0)
            self._release()

    def _flight_reports(self) -> set[str]:
        """Paths of the reports that the processes have written at their ends: there is one of all."""
        reports = [child.report for child in self._children if child.report is not None]
        return {report.flight for report in reports if report.flight}

    def _stop(self, kindly: float) -> None:
        for child in self._children:
            if child.ended is None:
                child.stopped = True
                child.process.terminate()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(
                        child.process.pid, signal.SIGCONT
                    )  # a frozen one does not hear the first
        until = time.monotonic() + kindly
        for child in self._children:
            child.process.join(max(until - time.monotonic(), 0.0))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.ended = child.ended or time.monotonic()

    def _raise_first_failure(self) -> None:
        failed = [c for c in self._children if c.failed]
        if not failed:
            return
        first = min(failed, key=_rank)
        others = MSG_OTHERS if len(self._children) > 1 else ""
        pid, code = first.process.pid, first.process.exitcode
        facts = {"ordinal": first.ordinal, "count": self._count, "pid": pid, "others": others}
        if first.report is not None and first.report.traceback:
            text = MSG_RAISED.format(text=first.report.traceback, **facts)
            raise ProcessRaisedException(text, first.ordinal, pid)
        name = signal.Signals(-code).name if code < 0 else None
        text = MSG_SIGNAL if name else MSG_EXIT
        message = text.format(code=code, name=name, **facts) + self._flight_report()
        raise ProcessExitedException(message, first.ordinal, pid, code, name)

    def _flight_report(self) -> str:
        """The line that names the report that others wrote of a process that said nothing, or nothing."""
        # the job's reports have the name of ordinal 0, which may be on another host
        named = (c.process.pid for c in self._children if c.ordinal == 0)
        return "".join(flight_recorder.report_of(pid, self._began) for pid in named)


def _rank(child: _Child) -> tuple[int, float]:
    """Which failure is the cause: different programs (a process may have been aborted by that), then a
    killed process, then one that raised, then who followed.
    """
    report = child.report
    if report is None or not report.traceback:
        kind = 1 if child.process.exitcode != EXIT_CODE else 4
    else:
        kind = {"difference": 0, "own": 2, "consequence": 3}[report.kind]
    return kind, report.when if report is not None else child.ended or 0.0


def _receive(child: _Child) -> None:
    try:
        while child.pipe.poll():
            child.report = child.pipe.recv()
    except (EOFError, OSError):
        return


# --- starting -----------------------------------------------------------------------------------


def local_environments(options: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables that each process of this host has in addition; one mapping for each process.

    The device's plugin says them (``launch_environments`` of its factory); without them there is one process.
    """
    factory = plugins.load_factory(runtime.device_type())
    environments = getattr(factory, "launch_environments", None)
    return [dict(one) for one in environments(options)] if environments is not None else [{}]


def _plan(
    options: Mapping[str, str], local: Sequence[Mapping[str, str]], attempt: int
) -> list[Job]:
    """The jobs' places of this host's processes: of one host, or of one among several.

    With several hosts each attempt meets at a port of its own, the first one's plus ``attempt``: a host that
    begins again before the others have seen the end would join the job that is ending.
    """
    hosts = job_from_environment(options, runtime.device_type())
    count = len(local)
    if hosts is None:
        return [Job(i, count, "", i, count, served=True) for i in range(count)]
    host, _, port = hosts.address.rpartition(":")
    address = f"{host}:{int(port) + attempt}" if port else hosts.address
    return [
        Job(hosts.index * count + i, hosts.count * count, address, i, count, served=True)
        for i in range(count)
    ]


def _environment(job: Job) -> dict[str, str]:
    return {
        COORDINATOR_VARIABLE: job.address,
        COUNT_VARIABLE: str(job.count),
        INDEX_VARIABLE: str(job.index),
        LOCAL_INDEX_VARIABLE: str(job.local_index),
        LOCAL_COUNT_VARIABLE: str(job.local_count),
        SERVED_VARIABLE: "1",
        flags.PJRT_DEVICE.name: runtime.device_type(),
    }


def start(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    start_method: str = "spawn",
    daemon: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Launch:
    """Start ``fn(ordinal, *args)`` in one process per device of this host.

    ``variables`` are added to the processes' environment.
    Raises RuntimeError when this process has used its devices already, NotImplementedError in SPMD mode.
    """
    if runtime.is_spmd():
        raise NotImplementedError(MSG_SPMD)
    if runtime.started():
        raise RuntimeError(MSG_STARTED)
    local = local_environments(os.environ)
    jobs = _plan(os.environ, local, int((variables or {}).get(RESTART_COUNT.name, "0")))
    context = torch.multiprocessing.get_context(start_method)
    # a fork server has the environment of the moment when it was started
    is_server = start_method == "forkserver"
    inherited = dict(os.environ) if is_server else {}
    with contextlib.ExitStack() as cleanup:
        if not jobs[0].address:
            reserved, address = _reserve_port()
            cleanup.callback(reserved.close)
            jobs = [dataclasses.replace(job, address=address) for job in jobs]
        ledger = LaunchLog.create(context, len(jobs), jobs[0].index)
        children = []
        for job, own in zip(jobs, local, strict=True):
            environment = {**inherited, **(variables or {}), **own, **_environment(job)}
            arguments = (environment, fn, tuple(args), ledger, is_server)
            children.append(_start_child(context, job, arguments, daemon, cleanup))
        if jobs[0].index == 0:
            # A process with the coordinator's threads should not be forked: after the children of this
            # launch are, and for launches that fork in no process that may launch others.
            begin = serve_apart if start_method == "fork" else serve
            cleanup.callback(begin(jobs[0].address, jobs[0].count).shutdown)
        return Launch(children, jobs[0].count, cleanup.pop_all().close, args)


def _start_child(
    context: Any, job: Job, arguments: Sequence[Any], daemon: bool, cleanup: contextlib.ExitStack
) -> _Child:
    """Start one process; ``cleanup`` ends it, if it still runs then."""
    receiver, sender = context.Pipe(duplex=False)
    cleanup.callback(receiver.close)
    with contextlib.closing(sender):
        process = context.Process(
            target=run_child, args=(job, sender, *arguments), name=f"xla-{job.index}", daemon=daemon
        )
        process.start()
    cleanup.callback(_end, process)
    return _Child(job.index, process, receiver)


def _end(process: Any) -> None:
    if process.is_alive():
        process.kill()
        process.join()


def _reserve_port() -> tuple[socket.socket, str]:
    """A free port of this host, kept from other programs until the socket is closed."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved, f"127.0.0.1:{reserved.getsockname()[1]}"


# --- the functions users call -------------------------------------------------------------------


def spawn(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Launch | None:
    """Run ``fn(ordinal, *args)`` in one process per device of this host (``xmp.spawn``).

    ``nprocs`` is None or the number of devices; with 1 ``fn`` is called directly, in this process.
    With ``join`` it waits and returns None, otherwise it returns an object with ``join()``,
    ``processes`` and ``pids()``. ``daemon`` and ``start_method`` are those of ``multiprocessing``.
    Raises ValueError for another number, ProcessRaisedException or ProcessExitedException when
    a process fails.
    """
    if nprocs == 1:
        fn(0, *args)
        return None
    if nprocs is not None:
        count = len(local_environments(os.environ))
        if nprocs != count:
            raise ValueError(MSG_NPROCS.format(got=nprocs, count=count))
    launched = start(fn, args, start_method, daemon)
    if not join:
        return launched
    launched.join()
    return None


def launch(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
    max_restarts: int = 0,
) -> None:
    """Run ``fn(ordinal, *args)`` on every device (``torch_xla.launch``).

    In one process per device of this host; with ``debug_single_process`` in one thread per device
    of this process. Under torchrun, which started the processes, and starts them again (``--max-restarts``),
    ``fn`` is called in this one with its local rank.

    When a process fails, all are started again, up to ``max_restarts`` times: ``fn`` reads its last checkpoint,
    and ``torch_xla.experimental.resume.restart_count()`` tells how often that was. Raises
    ValueError for ``max_restarts`` with threads, and what the last attempt ended with.
    """
    restarts.check(max_restarts, debug_single_process)
    if torch.distributed.is_torchelastic_launched():
        fn(int(os.environ["LOCAL_RANK"]), *args)
        return
    if debug_single_process:
        devices = runtime.devices()
        run_threads(devices, lambda ordinal: fn(ordinal, *args))
        return
    restarts.run(lambda more: start(fn, args, start_method, variables=more), max_restarts)


def run_multiprocess(
    fn: Callable[..., object], *args: object, start_method: str = "spawn", **kwargs: object
) -> dict[int, Any]:
    """Run ``fn(*args, **kwargs)`` in one process per device; what it returned, by ordinal."""
    launched = start(_WithoutOrdinal(fn, kwargs), args, start_method)
    launched.join()
    return launched.results()


@dataclasses.dataclass(frozen=True, slots=True)
class _WithoutOrdinal:
    """A function that pickles, and leaves out the ordinal that it is called with."""

    fn: Callable[..., object]
    kwargs: dict[str, object]

    def __call__(self, _ordinal: int, *args: object) -> Any:
        return self.fn(*args, **self.kwargs)
