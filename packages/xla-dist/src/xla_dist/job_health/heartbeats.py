"""Which processes of a job give signs of life, asked in a thread of its own.

The runtime answers once everybody who is alive has asked, or is dead: while one process is stopped, or
something keeps its interpreter busy, nobody gets an answer. The watchdog must go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from typing import Final

THREAD: Final = "xla-dist-signs"


class Signs(threading.Thread):
    """Asks every ``pause`` seconds which of ``count`` processes are ``alive``; all are, to begin with."""

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
                continue  # the coordinator is gone, which the watchdog finds out, too

    def stop(self) -> None:
        """Ask no more; an answer that is still awaited is not waited for."""
        self._stopped.set()
