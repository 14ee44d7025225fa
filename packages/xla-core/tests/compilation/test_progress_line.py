"""The line that says what is compiled: only on a terminal, only when it takes long."""

from __future__ import annotations

import io
import sys
import time

import pytest

from xla_core.compilation import progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch):
    """The same behaviour in hundredths of seconds, so that the test does not wait for real."""
    monkeypatch.setattr(progress_line, "AFTER_SECONDS", 0.03)
    monkeypatch.setattr(progress_line, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(progress_line, "SUMMARY_SECONDS", 0.05)


def test_quick_compilations_say_nothing():
    terminal = Terminal()
    with progress_line.watching("step", 10, terminal):
        pass
    assert terminal.getvalue() == ""


def test_long_ones_say_what_and_end_with_a_summary(impatient):
    terminal = Terminal()
    with progress_line.watching("step_1", 1467, terminal) as notice:
        notice.stage = "compiling"
        notice.functions = 3
        time.sleep(0.3)
    text = terminal.getvalue()
    assert "xla: compiling step_1: 1467 operations in 3 functions, 0 s" in text
    assert text.endswith("xla: compiled step_1: 1467 operations in 3 functions, 0 s\n")


def test_no_terminal_no_line(impatient):
    stream = io.StringIO()
    with progress_line.watching("step", 10, stream):
        time.sleep(0.1)
    assert stream.getvalue() == ""


def test_silent_when_told_so(impatient, monkeypatch):
    monkeypatch.setenv("XLA_COMPILE_PROGRESS", "0")
    terminal = Terminal()
    with progress_line.watching("step", 10, terminal):
        time.sleep(0.1)
    assert terminal.getvalue() == ""


def test_an_error_while_compiling_clears_the_line(impatient):
    terminal = Terminal()
    with pytest.raises(RuntimeError, match="broken"), progress_line.watching("s", 1, terminal):
        time.sleep(0.2)
        raise RuntimeError("broken")
    assert "\r\x1b[K" in terminal.getvalue()


class Kernel:
    """IPython as it looks in a notebook: a shell with a kernel, and outputs that can be updated."""

    def __init__(self) -> None:
        self.kernel = self
        self.shown: list[str] = []

    def get_ipython(self):
        return self

    def display(self, data, *, raw, display_id):
        assert raw and display_id
        self.update(data, raw=raw)
        return self

    def update(self, data, *, raw):
        assert raw and set(data) == {"text/plain"}
        self.shown.append(data["text/plain"])


def test_a_notebook_has_an_output_that_is_updated(impatient, monkeypatch):
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", kernel)
    with progress_line.watching("step_1", 1467) as notice:
        notice.stage = "compiling"
        time.sleep(0.3)
    assert kernel.shown[0] == "xla: compiling step_1: 1467 operations, 0 s"
    assert kernel.shown[-1] == "xla: compiled step_1: 1467 operations, 0 s"
    assert len(kernel.shown) > 2
    kernel.shown.clear()
    kernel.kernel = None  # IPython on a terminal, whose output goes to a file
    with progress_line.watching("step_1", 1467):
        time.sleep(0.1)
    assert kernel.shown == []
