"""Shows in a terminal or a notebook what is being compiled if it takes longer than a few seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol, TextIO

from xla_core.contract.foreign_values import ForeignObject
from xla_core.support import flags

AFTER_SECONDS: Final = 3.0
EVERY_SECONDS: Final = 1.0
SUMMARY_SECONDS: Final = 10.0

_lock = threading.Lock()  # one line at a time, whatever compiles in other threads
_under_way: list[Notice] = []


class Notice:
    """What is known so far of a program that is being made; ``functions`` may be filled in later."""

    def __init__(self, name: str, operations: int) -> None:
        self.name = name
        self.operations = operations
        self.functions = 1
        self.stage = "lowering"
        self.started = time.monotonic()

    def text(self) -> str:
        """One line without a line break; if several programs are being made, it says how many."""
        seconds = time.monotonic() - self.started
        functions = f" in {self.functions} functions" if self.functions > 1 else ""
        text = f"xla: {self.stage} {self.name}: {self.operations} operations{functions}, {seconds:.0f} s"
        several = len(_under_way)
        return f"{text} ({several} under way)" if several > 1 and self in _under_way else text


@contextlib.contextmanager
def watching(name: str, operations: int, stream: TextIO | None = None) -> Iterator[Notice]:
    """Show a line about the program that the block makes, if that takes more than three seconds.

    The line shows ``name``, the number of ``operations``, and what is set on the notice meanwhile. If several
    programs are being made, it shows one of them, and their number. It is redrawn every second on ``stream``
    (default: stderr), and replaced by a summary after more than ten seconds. A notebook shows it below the running
    cell. Nothing is shown if the stream is not a terminal, or with XLA_COMPILE_PROGRESS=0 or XLA_QUIET=1. The block
    may end in another thread than it began.
    """
    shown = flags.COMPILE_PROGRESS.get() and not flags.QUIET.get()
    screen = _screen(stream or sys.stderr) if shown else None
    notice = Notice(name, operations)
    done = threading.Event()
    drawer: threading.Thread | None = None
    if screen is not None:
        drawer = threading.Thread(target=_draw, args=(notice, screen, done), daemon=True)
        drawer.start()
    _under_way.append(notice)
    try:
        yield notice
    finally:
        _under_way.remove(notice)
        done.set()
        if drawer is not None:
            drawer.join()


class _Screen(Protocol):
    """A place that shows one line, and replaces it by the next."""

    def show(self, text: str) -> None: ...

    def end(self, text: str) -> None: ...


class _Terminal:
    """The last line of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str) -> None:
        """Write over the line."""
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()

    def end(self, text: str) -> None:
        """Leave ``text``, or nothing."""
        self.show(f"{text}\n" if text else "")


class _Notebook:
    """A separate output below a notebook's cell, which IPython updates in place."""

    def __init__(self, display: Callable[..., object]) -> None:
        self._display = display
        self._handle: ForeignObject = None

    def show(self, text: str) -> None:
        """Show the output, or update it."""
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def end(self, text: str) -> None:
        """Leave ``text``, or an empty output."""
        self.show(text)


def _screen(stream: TextIO) -> _Screen | None:
    """The notebook that runs this, or the terminal; None if nobody would see a line."""
    if stream.isatty():
        return _Terminal(stream)
    # without an import of IPython this is not a notebook; only the shell of a kernel can update outputs
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if stream is sys.stderr and shell is not None and getattr(shell, "kernel", None) is not None:
        return _Notebook(sys.modules["IPython.display"].display)
    return None


def _draw(notice: Notice, screen: _Screen, done: threading.Event) -> None:
    if done.wait(AFTER_SECONDS):
        return
    while not _lock.acquire(blocking=False):
        if done.wait(EVERY_SECONDS):
            return
    try:
        while True:
            screen.show(notice.text())
            if done.wait(EVERY_SECONDS):
                break
        seconds = time.monotonic() - notice.started
        if seconds >= SUMMARY_SECONDS:
            notice.stage = "compiled"
            screen.end(notice.text())
        else:
            screen.end("")
    finally:
        _lock.release()
