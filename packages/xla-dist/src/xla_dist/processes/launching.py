"""Starts the processes of a job on this host, waits for them, and reports the failure of the first that fails.

The launcher reserves a port, starts one process per device, and runs the coordinator, so that no
process of the job is special. As soon as one process fails, the launcher ends the others, and raises the exception
that ``torch.multiprocessing`` raises, with the ordinal and the traceback of the process that failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection as pipes
from multiprocessing.process import BaseProcess
from typing import Final, TypeVar

import torch
import torch.distributed
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from xla_core.contract.foreign_values import ForeignObject
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
    serve,
    serve_apart,
)
from xla_core.support import flags
from xla_dist.job_health import flight_recorder
from xla_dist.job_health.failure_reports import INTERRUPTED_SECONDS
from xla_dist.job_health.launch_log import LaunchLog
from xla_dist.job_health.local_processes import is_frozen
from xla_dist.processes import host_devices, restarts
from xla_dist.processes.child_process import Report, run_child
from xla_dist.processes.thread_replicas import run_threads
from xla_dist.settings import RESTART_COUNT

logger = logging.getLogger(__name__)

T = TypeVar("T")

# After the first process has failed, the others have this long to report: one of them may know the cause.
_GRACE_SECONDS: Final = 1.5
# From SIGTERM to SIGKILL.
_KILL_SECONDS: Final = 2.0
# Ctrl-C reaches the processes as well, and they may catch it to save a checkpoint. The watchdog of a process
# that waits in a collective for an interrupted one ends the process after ``INTERRUPTED_SECONDS``.
_INTERRUPT_SECONDS: Final = 2 * INTERRUPTED_SECONDS
# Most interrupted processes end sooner, and the launcher then says nothing.
_QUIET_SECONDS: Final = 1.0

MSG_NPROCS: Final = (
    "Unsupported nprocs ({got}). Leave it out (or give 1, or {count}): the number of processes is the "
    "number of devices on this host; on the CPU set CPU_NUM_DEVICES"
)
MSG_STARTED: Final = (
    "this process has already used its xla devices; call launch() or spawn() before you use a device, and use "
    "devices only inside the function that they run"
)
MSG_SPMD: Final = (
    "launch() and spawn() start replicas, but SPMD mode has one program over all devices: call the "
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
MSG_RESULT: Final = "the function's result on ordinal {ordinal} cannot be pickled: {error}"


@dataclasses.dataclass(slots=True)
class _Child:
    """One started process, its last report, and when the launcher saw that it had ended (monotonic seconds).

    ``stopped``: the launcher has ended it.
    """

    ordinal: int
    process: ForeignObject
    pipe: pipes.Connection
    report: Report | None = None
    ended: float | None = None
    stopped: bool = False

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.process.exitcode != 0 and not self.stopped


class Launch:
    """The running processes of one ``spawn``, which returns this object if ``join=False``."""

    def __init__(
        self,
        children: Sequence[_Child],
        count: int,
        release: Callable[[], None],
        arguments: Sequence[object],
    ) -> None:
        self._children = list(children)
        self._count = count
        self._release = release
        # keeps a lock among them alive: a process that starts slowly finds it by its name
        self._arguments = arguments
        self._began = time.time()

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, as ``multiprocessing`` has them, by local index."""
        return [child.process for child in self._children]

    def pids(self) -> list[int]:
        """Their process ids."""
        return [int(child.process.pid) for child in self._children]

    def results(self) -> dict[int, ForeignObject]:
        """What the function returned in each process, by ordinal; call it after ``join``.

        Raises TypeError for a result that cannot be pickled.
        """
        results: dict[int, ForeignObject] = {}
        for child in self._children:
            report = child.report
            if report is None:
                continue
            if report.result_error:
                error = report.result_error
                raise TypeError(MSG_RESULT.format(ordinal=child.ordinal, error=error))
            # a process that ended by sys.exit(0) has no result
            results[child.ordinal] = None if report.result is None else pickle.loads(report.result)
        return results

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all processes have ended; False if ``timeout`` seconds (default: no limit) are over first.

        If one fails, the others are ended after ``grace_period`` seconds (default: 1.5). A SIGTERM that comes
        meanwhile is passed on to all processes, and this one raises SystemExit when they have ended. Raises
        ProcessRaisedException or ProcessExitedException for the process that failed first.
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
                self._update(left)
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

    def _update(self, seconds: float) -> None:
        """Receive reports, and note which processes have ended; waits up to ``seconds`` for the first of these."""
        running = [c for c in self._children if c.ended is None]
        pipes.wait([c.process.sentinel for c in running] + [c.pipe for c in running], seconds)
        for child in running:
            _receive(child)
            if not child.process.is_alive():
                child.process.join()
                _receive(child)
                child.ended = time.monotonic()

    def _end_others(self, grace: float) -> None:
        """Give the other processes ``grace`` seconds to report, then end them; frozen ones cannot report."""
        until = time.monotonic() + grace
        while time.monotonic() < until and any(
            c.ended is None and not is_frozen(c.process.pid) for c in self._children
        ):
            self._update(0.1)
        self._stop(_KILL_SECONDS)

    def _end_interrupted(self) -> None:
        """Let the processes end by themselves, since Ctrl-C reaches them too; a second Ctrl-C ends them at once."""
        began, announced = time.monotonic(), False
        try:
            while any(c.ended is None for c in self._children):
                waited = time.monotonic() - began
                if waited > _INTERRUPT_SECONDS:
                    break
                if waited > _QUIET_SECONDS and not announced:
                    announced = True
                    logger.warning(MSG_INTERRUPTED, _INTERRUPT_SECONDS)
                self._update(0.1)
            for path in sorted(self._flight_reports()):
                logger.warning(MSG_WHERE, path)
        finally:
            self._stop(0.0)
            self._release()

    def _flight_reports(self) -> set[str]:
        """Paths of the flight reports that the processes have written; usually one, which covers all of them."""
        reports = [child.report for child in self._children if child.report is not None]
        return {report.flight for report in reports if report.flight}

    def _stop(self, seconds: float) -> None:
        """End the processes that still run: by SIGTERM, and by SIGKILL after ``seconds``."""
        for child in self._children:
            if child.ended is None:
                child.stopped = True
                child.process.terminate()
                with contextlib.suppress(ProcessLookupError):
                    # a frozen process receives SIGTERM only when it continues
                    os.kill(child.process.pid, signal.SIGCONT)
        until = time.monotonic() + seconds
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
        """A line that names the flight report that other processes wrote of one that did not report, or ``""``."""
        # the job's reports are named after ordinal 0, which may be on another host
        pids = (c.process.pid for c in self._children if c.ordinal == 0)
        return "".join(flight_recorder.report_of(pid, self._began) for pid in pids)


def _rank(child: _Child) -> tuple[int, float]:
    """A sort key for failures; the smallest is the cause.

    In this order: different programs (which can make gloo abort a process), a process that was killed, one that
    raised, and those that failed because of another.
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


def _plan(
    options: Mapping[str, str], local: Sequence[Mapping[str, str]], attempt: int
) -> list[Job]:
    """The places in the job of this host's processes; the job may run on several hosts.

    With several hosts, the port of an attempt is the first attempt's port plus ``attempt``: on the same port, a
    host that restarts early would join the attempt that has failed but has not yet ended on the other hosts.
    """
    hosts = plugins.job_of(runtime.device_type(), options)
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
    fn: Callable[..., object],
    args: Sequence[object] = (),
    start_method: str = "spawn",
    daemon: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Launch:
    """Start ``fn(ordinal, *args)`` in one process per device of this host; does not wait for them.

    ``start_method`` and ``daemon`` are those of ``multiprocessing``. ``variables`` (default: none) are added to the
    processes' environment. Raises RuntimeError if this process has already used its devices,
    NotImplementedError in SPMD mode.
    """
    if runtime.is_spmd():
        raise NotImplementedError(MSG_SPMD)
    if runtime.started():
        raise RuntimeError(MSG_STARTED)
    local = host_devices.environments(os.environ)
    jobs = _plan(os.environ, local, int((variables or {}).get(RESTART_COUNT.name, "0")))
    context = torch.multiprocessing.get_context(start_method)
    # processes inherit the environment that the fork server had when it started, which may be out of date
    from_server = start_method == "forkserver"
    inherited = dict(os.environ) if from_server else {}
    with contextlib.ExitStack() as cleanup:
        if not jobs[0].address:
            reserved, address = _reserve_port()
            cleanup.callback(reserved.close)
            jobs = [dataclasses.replace(job, address=address) for job in jobs]
        launch_log = LaunchLog.create(context, len(jobs), jobs[0].index)
        children = []
        for job, own in zip(jobs, local, strict=True):
            environment = {**inherited, **(variables or {}), **own, **_environment(job)}
            arguments = (environment, fn, tuple(args), launch_log, from_server)
            children.append(_start_child(context, job, arguments, daemon, cleanup))
        if jobs[0].index == 0:
            # A process should not fork while the coordinator's threads run in it. So the coordinator starts after
            # this launch's processes; and for the start method "fork" it runs in a process of its own, because this
            # one may launch again.
            begin = serve_apart if start_method == "fork" else serve
            cleanup.callback(begin(jobs[0].address, jobs[0].count).shutdown)
        return Launch(children, jobs[0].count, cleanup.pop_all().close, args)


def _start_child(
    context: ForeignObject, job: Job, arguments: Sequence[object], daemon: bool, cleanup: contextlib.ExitStack
) -> _Child:  # fmt: skip
    """Start one process; ``cleanup`` will kill it if it still runs."""
    receiver, sender = context.Pipe(duplex=False)
    cleanup.callback(receiver.close)
    with contextlib.closing(sender):
        process = context.Process(
            target=run_child, args=(job, sender, *arguments), name=f"xla-{job.index}", daemon=daemon
        )
        process.start()
    cleanup.callback(_kill, process)
    return _Child(job.index, process, receiver)


def _kill(process: BaseProcess) -> None:
    if process.is_alive():
        process.kill()
        process.join()


def _reserve_port() -> tuple[socket.socket, str]:
    """A free port of this host, as ``host:port``; no other program gets it until the socket is closed."""
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

    ``nprocs`` is None (default) or the number of devices; with 1, ``fn`` is called directly in this process, which
    on a TPU host gets the first chip (``TPU_VISIBLE_CHIPS`` and others are set). With
    ``join`` (default) it waits for the processes and returns None; otherwise it returns a ``Launch``, which has
    ``join()``, ``processes`` and ``pids()``. ``daemon`` (default: False) and ``start_method`` (default:
    ``"spawn"``) are those of ``multiprocessing``. Raises ValueError for another ``nprocs``, what ``start`` raises,
    and ProcessRaisedException or ProcessExitedException if a process fails.
    """
    if nprocs == 1:
        host_devices.use_one()
        fn(0, *args)
        return None
    if nprocs is not None:
        count = len(host_devices.environments(os.environ))
        if nprocs != count:
            raise ValueError(MSG_NPROCS.format(got=nprocs, count=count))
    running = start(fn, args, start_method, daemon)
    if not join:
        return running
    running.join()
    return None


def launch(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
    max_restarts: int = 0,
) -> None:
    """Run ``fn(ordinal, *args)`` on every device of this host, and wait for it (``torch_xla.launch``).

    Starts one process per device by ``start_method`` (default: ``"spawn"``). With ``debug_single_process``
    (default: False) it starts one thread per device of this process instead. Under torchrun, which has already
    started the processes, it calls ``fn`` in this one with its local rank; torchrun restarts them
    (``--max-restarts``).

    If a process fails, all are started again, up to ``max_restarts`` times (default: 0): ``fn`` should then load
    its last checkpoint; ``torch_xla.experimental.resume.restart_count()`` returns the number of restarts. Raises
    ValueError for ``max_restarts`` with threads or below 0, what ``start`` raises, and ProcessRaisedException or
    ProcessExitedException if a process of the last attempt fails.
    """
    restarts.check(max_restarts, debug_single_process)
    if torch.distributed.is_torchelastic_launched():
        fn(int(os.environ["LOCAL_RANK"]), *args)
        return
    if debug_single_process:
        devices = runtime.devices()
        run_threads(devices, lambda ordinal: fn(ordinal, *args))
        return
    restarts.run(lambda added: start(fn, args, start_method, variables=added), max_restarts)


def run_multiprocess(
    fn: Callable[..., T], *args: object, start_method: str = "spawn", **kwargs: object
) -> dict[int, T]:
    """Run ``fn(*args, **kwargs)`` in one process per device; returns the results by ordinal.

    ``start_method`` (default: ``"spawn"``) is that of ``multiprocessing``. Raises TypeError if a result cannot be
    pickled, and what ``launch`` raises for processes.
    """
    running = start(_WithoutOrdinal(fn, kwargs), args, start_method)
    running.join()
    return running.results()


@dataclasses.dataclass(frozen=True, slots=True)
class _WithoutOrdinal:
    """Calls ``fn`` without the ordinal, its first argument; can be pickled, unlike a local function."""

    fn: Callable[..., object]
    kwargs: dict[str, object]

    def __call__(self, _ordinal: int, *args: object) -> object:
        return self.fn(*args, **self.kwargs)
