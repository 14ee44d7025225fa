"""Finds processes of the job on this host that have ended or been stopped, in Linux's ``/proc``.

Such a process also gives no sign of life, but these may be late for other reasons as well, so that they
are waited for longer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from xla_core.extension_api import jobs

_FOLDER: Final = "xla/process"
_GAP_SECONDS: Final = 2.0
"""After a gap this long between checks, this process may itself have been stopped with the others (by Ctrl-Z)."""
_ENDED: Final = ("", "Z", "X")
"""There is no such process, or it has ended and its parent has not read its status yet."""


class State(NamedTuple):
    """The state of a process as one letter, and its user and system time; empty if there is no such process."""

    letter: str = ""
    user: str = ""
    system: str = ""


def is_frozen(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False if the system does not tell."""
    return _state(pid).letter in ("T", "t")


def introduce() -> None:
    """Publish this process's number, if the system has ``/proc``."""
    met, system = jobs.connection(), _system()
    if met is not None and system:
        jobs.publish(f"{_FOLDER}/{met.job.index}", f"{system} {os.getpid()}".encode())


class LocalProcesses:
    """Checks the other processes on this host repeatedly, and remembers since when one has been stopped or gone."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pids: dict[int, int] = {}
        self._heard: set[int] = set()
        self._since: dict[int, tuple[State, float]] = {}
        self._looked = 0.0

    def look(self) -> None:
        """Check all of them."""
        if len(self._heard) < self._count:
            self._listen()
        now = time.monotonic()
        if now - self._looked > _GAP_SECONDS:
            self._since.clear()
        self._looked = now
        for ordinal, pid in self._pids.items():
            state = _state(pid)
            # Not "t", because a traced process stops at each system call. The state includes the processor time,
            # because tools that limit a process's share stop it many times a second, and let it run in between.
            if state.letter not in ("T", *_ENDED):
                self._since.pop(ordinal, None)
            elif ordinal not in self._since or self._since[ordinal][0] != state:
                self._since[ordinal] = (state, now)

    def frozen(self) -> dict[int, float]:
        """For how many seconds each stopped process has been stopped, by ordinal, at the last check."""
        return {n: self._looked - since for n, (s, since) in self._since.items() if s.letter == "T"}

    def gone(self) -> dict[int, float]:
        """For how many seconds each ended process has been gone, by ordinal; the first to end comes first."""
        seconds = {
            n: self._looked - since for n, (s, since) in self._since.items() if s.letter != "T"
        }
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def _listen(self) -> None:
        system = _system()
        for name, data in jobs.published(_FOLDER).items():
            self._heard.add(int(name))
            where, _, pid = data.decode().rpartition(" ")
            # a process must have been seen before it can be missing: /proc may hide those of other users
            is_other = where == system and int(pid) != os.getpid()
            if is_other and _state(int(pid)).letter not in _ENDED:
                self._pids[int(name)] = int(pid)


def _state(pid: int) -> State:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return State()
    # "pid (name) state ...", and the name may have any characters: proc_pid_stat(5)
    words = stat.rpartition(")")[2].split()
    return State(words[0], *words[11:13])


def _system() -> str:
    """A text that is equal for processes that see each other under the same numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
