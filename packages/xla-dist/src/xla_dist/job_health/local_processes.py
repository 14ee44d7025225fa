"""Which processes of a job have ended or been stopped: Linux tells of those on this host, in ``/proc``.

Such a process gives no sign of life either; but signs may be late for other reasons, too, so that they
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
"""Who has not looked for so long may have been stopped, too, with the others (as by Ctrl-Z)."""
_ENDED: Final = ("", "Z", "X")
"""States without a process, and of one that has ended and whose parent has not asked for its status."""


class State(NamedTuple):
    """State of a process, as one letter, its time in programs and in the system; empty without one."""

    letter: str = ""
    user: str = ""
    system: str = ""


def is_frozen(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the system does not tell."""
    return _state(pid).letter in ("T", "t")


def introduce() -> None:
    """Tell the others which process this one is; nothing where the system does not tell of processes."""
    met, system = jobs.connection(), _system()
    if met is not None and system:
        jobs.publish(f"{_FOLDER}/{met.job.index}", f"{system} {os.getpid()}".encode())


class Neighbours:
    """Looks at the other processes on this host again and again; remembers since when one does nothing."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pids: dict[int, int] = {}
        self._heard: set[int] = set()
        self._since: dict[int, tuple[State, float]] = {}
        self._looked = 0.0

    def look(self) -> None:
        """See what has become of all of them."""
        if len(self._heard) < self._count:
            self._listen()
        now = time.monotonic()
        if now - self._looked > _GAP_SECONDS:
            self._since.clear()
        self._looked = now
        for ordinal, pid in self._pids.items():
            state = _state(pid)
            # Not "t": who is traced stops at each system call. The processor time: what limits a
            # process's share stops it many times a second, and lets it run in between.
            if state.letter not in ("T", *_ENDED):
                self._since.pop(ordinal, None)
            elif ordinal not in self._since or self._since[ordinal][0] != state:
                self._since[ordinal] = (state, now)

    def frozen(self) -> dict[int, float]:
        """For how many seconds those have been stopped that are, by ordinal, at the last look."""
        return {n: self._looked - since for n, (s, since) in self._since.items() if s.letter == "T"}

    def gone(self) -> dict[int, float]:
        """For how many seconds ended processes have been missing, by ordinal; the first to end comes first."""
        seconds = {
            n: self._looked - since for n, (s, since) in self._since.items() if s.letter != "T"
        }
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def _listen(self) -> None:
        system = _system()
        for name, data in jobs.published(_FOLDER).items():
            self._heard.add(int(name))
            where, _, pid = data.decode().rpartition(" ")
            # only who has been seen can be missed: /proc may hide the processes of other users
            if (
                where == system
                and int(pid) != os.getpid()
                and _state(int(pid)).letter not in _ENDED
            ):
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
    """What two processes have in common that see each other under the same numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
