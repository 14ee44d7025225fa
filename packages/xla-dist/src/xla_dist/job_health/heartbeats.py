"""Asks the runtime, in a separate thread, which processes of a job give signs of life.

The runtime answers when all live processes have asked. While one process is stopped, or
something keeps its interpreter busy, no process gets an answer, but the watchdog must continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from typing import Final

THREAD: Final = "xla-dist-signs"


class Heartbeats(threading.Thread):
    """Asks every ``pause`` seconds which of ``count`` processes are ``alive`` (initially all of them)."""

    def __init__(
        self, count: int, ask: Callable[[Sequence[int]], Container[int]], pause: float
    ) -> None:
        super().__init__(name=THREAD, daemon=True)
        self.alive: Container[int] = range(count)
        self._everyone = list(range(count))
        self._ask = ask
        self._pause = pause
        self._stopped = threading.Event()

    def run(self) -> None:
        """Ask until ``stop()``."""
        while not self._stopped.wait(self._pause):
            try:
                self.alive = self._ask(self._everyone)
            except RuntimeError:
                continue  # the coordinator is gone, which the watchdog also notices

    def stop(self) -> None:
        """Stop asking, without waiting for a pending answer."""
        self._stopped.set()
