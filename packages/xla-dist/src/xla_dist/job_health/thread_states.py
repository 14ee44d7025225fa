"""What the threads of this process are doing, and whether any of them can continue by itself.

A process that computes, sleeps, reads or waits for another process is slow, but may still arrive, however long it
takes. A process whose threads all wait for locks that only its own threads could release never arrives. Linux shows
in ``/proc`` the system call of each thread with its arguments: a wait for a lock is ``futex`` (private to the
process, without a time limit). If this cannot be read, no process counts as locked.
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
import platform
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from xla_core.support.own_packages import IMPORT_NAMES
from xla_dist.job_health import heartbeats

_TASKS: Final = Path("/proc/self/task")
_FUTEX: Final = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
_SLEEPS: Final = {"x86_64": ("35", "230"), "aarch64": ("101", "115")}.get(platform.machine(), ())
_PRIVATE: Final = 0x80
_COMMAND: Final = 0x7F
_WAITS: Final = (0, 9)
"""FUTEX_WAIT and FUTEX_WAIT_BITSET of linux/futex.h."""
_GRPC_THREADS: Final = ("grpc", "event_engine", "lifeguard")
"""Names of gRPC's threads, which come and go. One of them polls for the runtime; a second one would belong
to another library, for which the user's program may be waiting."""
FLIGHT_THREAD: Final = "xla-flight"
_OWN_THREADS: Final = ("xla-dist-watchdog", heartbeats.THREAD, "xla-launcher", FLIGHT_THREAD)
_OWN_PACKAGES: Final = (*IMPORT_NAMES, "jax", "jaxlib")
_LIBRARY: Final = (*map(sysconfig.get_path, ("stdlib", "purelib")), "<frozen ")
# libraries may lie in several folders: a user's own, one that environments share
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FRAMES: Final = 25
_BUSY_SHARE: Final = 0.02
"""The share of a processor's time from which a thread counts as computing; many processes may share a processor."""
_LOOKS: Final = 5
_PAUSE_SECONDS: Final = 0.01

COMPUTES: Final = "it computes"
LOCKED: Final = "it waits for a lock"
SLEEPS: Final = "it sleeps"
INPUT: Final = "it waits for input, output or another process"
ENDED: Final = "its main thread has ended"


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """Where the main thread is, what it does, its stack, and for how many seconds no thread could continue.

    ``locked`` is 0 while some thread can continue.
    """

    place: str
    doing: str
    stack: str
    locked: float

    def encode(self) -> bytes:
        """The form that other processes read."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Condition:
        """The inverse of ``encode``."""
        return cls(**json.loads(data))


# Threads that the runtime has started, and those that existed before.
_runtime_threads: Final[set[int]] = set()
_others: Final[set[int]] = set()


def runtime_starts() -> None:
    """Called before the runtime starts threads (for the clients of the coordinator and of the device)."""
    _others.clear()
    _others.update(_task_ids())


def runtime_started() -> None:
    """Called afterwards: the new threads wait for the network or for work, never for the user's program."""
    _runtime_threads.update(set(_task_ids()) - _others)


class ThreadWatch:
    """Checks this process's threads repeatedly, and remembers since when none could continue."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0
        self._time: tuple[float, float] | None = None

    def forget(self) -> None:
        """Start over, because no process waits for this one any longer."""
        self._seen = self._time = None

    def look(self) -> Condition:
        """The current condition."""
        now = time.monotonic()
        seen = self._all_locked()
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        locked = now - self._since if seen is not None else 0.0
        frames = sys._current_frames()
        frame = frames.get(_main().ident or 0)
        stack = "".join(traceback.format_stack(frame, _FRAMES)) if frame else ""
        stack += _others_at(frames)
        frames.clear()  # it contains this call's own frame: a cycle, which would keep the user's frames alive
        return Condition(_place(frame), self._doing(now), stack, locked)

    def _doing(self, now: float) -> str:
        if not _main().is_alive():
            return ENDED
        used = time.clock_gettime(time.pthread_getcpuclockid(_main().ident or 0))
        former, self._time = self._time, (now, used)
        busy = former is not None and used - former[1] > _BUSY_SHARE * (now - former[0])
        return COMPUTES if busy else _settled_state(os.getpid())

    def _all_locked(self) -> object:
        """A value that stays equal while every thread is locked; None if a thread can continue."""
        if _FUTEX is None or signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):
            return None
        python = _python_threads()
        used = []
        pollers = 0
        for task in _task_ids():
            if python.get(task) in _OWN_THREADS:
                continue
            if task in python:
                if not _waits_for_lock(task):
                    return None
                used.append((task, _processor_time(task)))
            elif task not in _runtime_threads and not _idle(task):
                pollers += 1
                if pollers > 1 or not _read(task, "comm").startswith(_GRPC_THREADS):
                    return None
        return None if _in_own_packages() else tuple(used)


def _main() -> threading.Thread:
    return threading.main_thread()


def _task_ids() -> list[int]:
    return [int(path.name) for path in _TASKS.iterdir()] if _TASKS.exists() else []


def _python_threads() -> dict[int, str]:
    """The names of the threads that run Python, by the system's number."""
    names = {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None}
    return {**names, os.getpid(): _main().name}  # even if the main thread has ended


def _read(task: int, name: str) -> str:
    try:
        return (_TASKS / str(task) / name).read_text()
    except OSError:
        return ""  # the thread has just ended, or the system does not tell


def _system_call(task: int) -> list[str]:
    """Number and arguments of a thread's current system call; empty if it is running or this cannot be read."""
    words = _read(task, "syscall").split()
    return words if len(words) > 5 else []


def _settled_state(task: int) -> str:
    """What a thread of Python does, apart from waiting for the interpreter's lock, which the caller holds.

    That wait is a ``futex`` with a time limit, and the thread runs for a moment after it: while a thread does
    either, the caller lets it continue and looks again.
    """
    state = COMPUTES
    for _ in range(_LOOKS):
        time.sleep(_PAUSE_SECONDS)
        text = _read(task, "syscall")
        call = text.split()
        if text.startswith(("running", "-1")):  # -1: outside of system calls, to load a page
            state = COMPUTES
        elif call[:1] == [_FUTEX]:
            state = LOCKED
            if _is_lock(call):
                break
        else:
            return SLEEPS if call and call[0] in _SLEEPS else INPUT
    return state


def _waits_for_lock(task: int) -> bool:
    """Whether a thread waits for another one of this process, without a time limit."""
    return _is_lock(_system_call(task))


def _is_lock(call: list[str]) -> bool:
    """Whether a system call is the wait for a lock of this process, without a time limit."""
    if call[:1] != [_FUTEX]:
        return False
    operation, limit = int(call[2], 16), int(call[4], 16)
    return bool(operation & _PRIVATE) and operation & _COMMAND in _WAITS and limit == 0


def _idle(task: int) -> bool:
    """Whether a thread that runs no Python waits for work."""
    return _system_call(task)[:1] == [_FUTEX]


def _processor_time(task: int) -> str:
    """The processor time of a thread in nanoseconds."""
    return _read(task, "schedstat").partition(" ")[0]


def _in_own_packages() -> bool:
    """Whether a thread is inside this project or jax, whose own threads may wake it."""
    own = {t.ident for t in threading.enumerate() if t.name in _OWN_THREADS}
    return any(
        str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN_PACKAGES
        for ident, frame in sys._current_frames().items()
        if ident not in own
    )


def _others_at(frames: Mapping[int, FrameType]) -> str:
    """A line for each other thread of the user's program."""
    others = [t for t in threading.enumerate() if t is not _main() and t.name not in _OWN_THREADS]
    return "".join(
        f"  Thread {t.name!r} is at {_place(frames.get(t.ident or 0))}\n" for t in others
    )


def _is_library(frame: FrameType) -> bool:
    """Whether a frame belongs to a library, including this project, even if it is installed elsewhere."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    name = frame.f_code.co_filename
    if name == "<string>":  # made by exec, as the methods of dataclasses are
        name = str(frame.f_globals.get("__file__", name))
    return (
        name.startswith(_LIBRARY)
        or any(folder in name for folder in _INSTALLED)
        or package in (*_OWN_PACKAGES, "torch")  # built from their sources, they lie elsewhere
    )


def _place(frame: FrameType | None) -> str:
    """The innermost line outside libraries: ``train.py:12 in load: batch = queue.get()``."""
    inner = frame
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or inner
    return _line(frame, frame.f_lineno) if frame is not None else "its end"


def _line(frame: FrameType, number: int) -> str:
    """A line of a frame: ``train.py:12 in load: batch = queue.get()``."""
    name = frame.f_code.co_filename
    text = linecache.getline(name, number).strip()
    return f"{name}:{number} in {frame.f_code.co_name}" + (f": {text}" if text else "")


def main_place() -> str:
    """The line outside libraries at which the main thread is."""
    return _place(sys._current_frames().get(_main().ident or 0))


def place_of_error(trace: TracebackType | None) -> str:
    """The innermost line outside libraries in a traceback."""
    innermost = last = None
    while trace is not None:
        last = trace
        if not _is_library(trace.tb_frame):
            innermost = trace
        trace = trace.tb_next
    innermost = innermost or last
    return (
        _line(innermost.tb_frame, innermost.tb_lineno)
        if innermost is not None
        else "a line that is not known"
    )
