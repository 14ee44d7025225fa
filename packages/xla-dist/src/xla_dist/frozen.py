"""Which processes of a job somebody has stopped: Linux tells of those on the same host, in ``/proc``.

A stopped process gives no sign of life either; but a sign may be late for other reasons, too, so that
is waited for twice as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container
from pathlib import Path
from typing import Final

from xla_core import distributed

_FOLDER: Final = "xla/process"
_GAP_SECONDS: Final = 2.0
"""Who has not looked for so long may have been stopped, too, with the others (as by Ctrl-Z)."""


def is_frozen(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the system does not tell."""
    return _state(pid)[0] in ("T", "t")


def introduce() -> None:
    """Tell the others which process this one is; nothing where the system does not tell of processes."""
    met, system = distributed.connection(), _system()
    if met is not None and system:
        distributed.publish(f"{_FOLDER}/{met.job.index}", f"{system} {os.getpid()}".encode())


class Frozen:
    """Looks at the other processes on this host again and again; remembers since when they stand still."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pids: dict[int, int] = {}
        self._heard: set[int] = set()
        self._since: dict[int, tuple[object, float]] = {}
        self._looked = 0.0

    def look(self, done: Container[str]) -> dict[int, float]:
        """For how many seconds processes have been stopped, by ordinal, but for those that are ``done``."""
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
            if state[0] != "T" or str(ordinal) in done:
                self._since.pop(ordinal, None)
            elif self._since.get(ordinal, ("", 0.0))[0] != state:
                self._since[ordinal] = (state, now)
        return {ordinal: now - since for ordinal, (_, since) in self._since.items()}

    def _listen(self) -> None:
        system = _system()
        for name, data in distributed.published(_FOLDER).items():
            self._heard.add(int(name))
            where, _, pid = data.decode().rpartition(" ")
            if where == system and int(pid) != os.getpid():
                self._pids[int(name)] = int(pid)


def _state(pid: int) -> tuple[str, str, str]:
    """State of a process and its time in programs and in the system; empty where nothing is told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", "", ""
    # "pid (name) state ...", and the name may have any characters: proc_pid_stat(5)
    words = stat.rpartition(")")[2].split()
    return words[0], words[11], words[12]


def _system() -> str:
    """What two processes have in common that see each other under the same numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
