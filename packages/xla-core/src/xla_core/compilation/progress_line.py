"""Tells a person at a terminal what is being compiled when it takes longer than a few seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, TextIO

from xla_core.support import flags

AFTER_SECONDS: Final = 3.0
EVERY_SECONDS: Final = 1.0
SUMMARY_SECONDS: Final = 10.0

_lock = threading.Lock()  # one line at a time, whatever compiles in other threads
_under_way: list[Notice] = []


class Notice:
    """What is known so far of the program in the making; ``functions`` may be filled in later."""

    def __init__(self, name: str, operations: int) -> None:
        self.name = name
        self.operations = operations
        self.functions = 1
        self.stage = "lowering"
        self.started = time.monotonic()

    def text(self) -> str:
        """One line without a line break; of several programs it says how many there are."""
        seconds = time.monotonic() - self.started
        functions = f" in {self.functions} functions" if self.functions > 1 else ""
        text = f"xla: {self.stage} {self.name}: {self.operations} operations{functions}, {seconds:.0f} s"
        several = len(_under_way)
        return f"{text} ({several} under way)" if several > 1 and self in _under_way else text


@contextlib.contextmanager
def watching(name: str, operations: int, stream: TextIO | None = None) -> Iterator[Notice]:
    """Show a line about the program inside the ``with`` block if that takes more than three seconds.

    Of several at once one is shown, and how many there are; the block may end in another thread. ``name`` and
    the number of ``operations`` are what it says; what the notice is told meanwhile is added. The line is redrawn
    every second on ``stream`` (default: stderr), and replaced by a summary when it took more than ten. Nothing is
    shown when the stream is no terminal or XLA_COMPILE_PROGRESS=0.
    """
    stream = stream or sys.stderr
    notice = Notice(name, operations)
    done = threading.Event()
    drawer: threading.Thread | None = None
    if flags.COMPILE_PROGRESS.get() and stream.isatty():
        drawer = threading.Thread(target=_draw, args=(notice, stream, done), daemon=True)
        drawer.start()
    _under_way.append(notice)
    try:
        yield notice
    finally:
        _under_way.remove(notice)
        done.set()
        if drawer is not None:
            drawer.join()


def _draw(notice: Notice, stream: TextIO, done: threading.Event) -> None:
    if done.wait(AFTER_SECONDS):
        return
    while not _lock.acquire(blocking=False):
        if done.wait(EVERY_SECONDS):
            return
    try:
        while True:
            stream.write(f"\r\x1b[K{notice.text()}")
            stream.flush()
            if done.wait(EVERY_SECONDS):
                break
        stream.write("\r\x1b[K")
        seconds = time.monotonic() - notice.started
        if seconds >= SUMMARY_SECONDS:
            notice.stage = "compiled"
            stream.write(notice.text() + "\n")
        stream.flush()
    finally:
        _lock.release()
