"""The report of ``xla-debug run`` for a part of a script, such as a training loop or a cell of a notebook."""

from __future__ import annotations

import contextlib
import html
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from xla_debug.run_report import advice, html_report, terminal
from xla_debug.run_report.advice import Advice
from xla_debug.run_report.recorder import Recorder

MSG_RUNNING: Final = "the recorded block has not ended: use the report after it"
_HEIGHT: Final = 720  # pixels of the frame in a notebook, in which the page is scrolled


class Report:
    """Where the time of a block went, and what to change first.

    A notebook shows it as the page with plots, and ``print`` as the tables of ``xla-debug run``. ``title`` is the
    heading of the page. Until the block has ended, all uses but ``repr`` raise RuntimeError.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._recorder: Recorder | None = None

    def __str__(self) -> str:
        text = io.StringIO()
        # force_jupyter: in a notebook, rich would display the tables itself instead of writing them to the file
        console = Console(
            file=text, width=terminal.WIDTH, highlight=False, force_jupyter=False, color_system=None
        )
        terminal.show(self._done(), console)
        return text.getvalue()

    def __repr__(self) -> str:
        return str(self) if self._recorder is not None else f"<{MSG_RUNNING}>"

    def _repr_html_(self) -> str:
        # in a frame, so that the styles of page and notebook do not affect each other
        page = html.escape(html_report.render(self._done(), self.title))
        style = "width: 100%; border: 1px solid #d8dee4"
        return f'<iframe srcdoc="{page}" style="{style}" height="{_HEIGHT}"></iframe>'

    def advice(self) -> list[Advice]:
        """The changes that would save most time, at most three, the most effective one first."""
        return advice.advice(self._done())

    def save(self, path: str) -> None:
        """Write the page as one HTML file to ``path``."""
        Path(path).write_text(html_report.render(self._done(), self.title), encoding="utf-8")

    def finish(self, recorder: Recorder) -> None:
        """Set what was recorded; called at the end of the block."""
        self._recorder = recorder

    def _done(self) -> Recorder:
        if self._recorder is None:
            raise RuntimeError(MSG_RUNNING)
        return self._recorder


@contextlib.contextmanager
def recording(title: str = "recorded block") -> Iterator[Report]:
    """A context manager that records what runs in the block, and yields a ``Report`` to use afterwards.

    The report is complete also if the block raises an error. ``title`` is the heading of its page.
    """
    report, recorder = Report(title), Recorder()
    recorder.start()
    try:
        yield report
    finally:
        recorder.stop()
        report.finish(recorder)
