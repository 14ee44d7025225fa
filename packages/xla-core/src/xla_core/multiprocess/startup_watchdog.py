"""Waiting for the processes of a job to start: who is on the way, and who never comes.

A process that starts slowly must be waited for, one that was never started must not. On one host the
two can be told apart: each process was started with its number in its environment, which Linux shows
in ``/proc``. A number that no process of this host has, for some seconds, will not come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from xla_core.support import flags

logger = logging.getLogger(__name__)

EXIT_CODE: Final = 70
"""Exit status of a process that ends because another one failed (EX_SOFTWARE of sysexits.h)."""

_TICK_SECONDS: Final = 0.5
_WARN_SECONDS: Final = 10.0

MSG_ABSENT: Final = (
    "xla-core: process {index} of {count} ends. It waited at {address} for process {absent}, and no "
    "process with {variable}={absent} runs on this host: it was never started, or has ended before "
    "it used a device ({seconds} s, XLA_DIST_ABSENT_TIMEOUT)"
)
MSG_SLOW: Final = (
    "process {index} of {count} has waited {seconds:.0f} s for all {count} processes to meet at "
    "{address}; it waits {limit} s (XLA_DIST_START_TIMEOUT)"
)
MSG_WAITED: Final = (
    "process {index} of {count} has waited {limit} s (XLA_DIST_START_TIMEOUT) for all {count} "
    "processes to meet at {address}; the job ends. The runtime's message below names those that "
    "never arrived (as 'timed out task names')"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Siblings:
    """The processes of a job that belong on this host, and how their environments tell.

    ``variable`` holds the number of each, ``shared`` what all of them have.
    """

    expected: Sequence[int]
    variable: str
    shared: Mapping[str, str]

    def absent(self, me: int) -> list[int]:
        """Numbers that no process has; none where this one (``me``) is not seen that way either."""
        marks = [f"{name}={value}".encode() for name, value in self.shared.items()]
        present: set[int] = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                entries = path.read_bytes().split(b"\0")
                if all(mark in entries for mark in marks):
                    present |= self._numbers(entries)
        return [i for i in self.expected if i not in present] if me in present else []

    def _numbers(self, entries: Sequence[bytes]) -> set[int]:
        prefix = f"{self.variable}=".encode()
        texts = [entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)]
        return {int(text) for text in texts if text.isdigit()}


class StartupWatchdog(threading.Thread):
    """Looks who is missing while the main thread waits inside the runtime; may end this process."""

    def __init__(
        self, index: int, count: int, address: str, limit: int, local: Siblings | None
    ) -> None:
        super().__init__(name="xla-arrival", daemon=True)
        self._local = local
        self._facts = {"index": index, "count": count, "address": address, "limit": limit}
        self._index = index
        self._limit = limit
        self._began = time.monotonic()
        self._since: float | None = None
        self._said: set[str] = set()
        self._over = threading.Event()

    def run(self) -> None:
        """Look until all have come."""
        while not self._over.wait(_TICK_SECONDS):
            now = time.monotonic()
            self._look(now)
            if now - self._began > self._limit - 2 * _TICK_SECONDS:
                self._say(logging.ERROR, MSG_WAITED, now)
            elif now - self._began > _WARN_SECONDS:
                self._say(logging.WARNING, MSG_SLOW, now)

    def stop(self) -> None:
        """All have come, or waiting has failed."""
        self._over.set()

    def _say(self, level: int, text: str, now: float) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.log(level, text.format(seconds=now - self._began, **self._facts))

    def _look(self, now: float) -> None:
        absent = self._local.absent(self._index) if self._local is not None else []
        if self._local is None or not absent:
            self._since = None
            return
        self._since = self._since or now
        seconds = flags.ABSENT_TIMEOUT.get()
        if now - self._since >= seconds and not self._over.is_set():
            variable = self._local.variable
            facts = {**self._facts, "absent": absent[0], "variable": variable, "seconds": seconds}
            sys.stdout.flush()
            # the main thread is inside the runtime, where no exception reaches it
            print(MSG_ABSENT.format(**facts), file=sys.stderr, flush=True)  # noqa: T201
            os._exit(EXIT_CODE)


@contextlib.contextmanager
def vigil(
    index: int, count: int, address: str, limit: int, local: Siblings | None
) -> Iterator[None]:
    """Inside the ``with`` block, say for whom process ``index`` waits, and end it if that is in vain.

    ``limit`` is the number of seconds that the runtime waits, ``local`` the processes that belong on
    this host, where that is known.
    """
    thread = StartupWatchdog(index, count, address, limit, local)
    thread.start()
    try:
        yield
    finally:
        thread.stop()
