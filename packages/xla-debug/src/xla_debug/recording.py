"""What ``xla-debug run`` tells of a script, for a part of one: a training loop, a cell of a notebook."""

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

MSG_RUNNING: Final = "the block that is recorded has not ended: look at the report after it"
_HEIGHT: Final = 720  # pixels of the page in a notebook; the rest is scrolled to


class Report:
    """Where the time of a block went, and what to change first.

    A notebook shows the page with plots, ``print`` the tables of ``xla-debug run``. Until the block has ended
    everything here raises RuntimeError.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._recorder: Recorder | None = None

    def __str__(self) -> str:
        text = io.StringIO()
        # in a notebook rich would show the tables by itself
        console = Console(
            file=text, width=terminal.WIDTH, highlight=False, force_jupyter=False, color_system=None
        )
        terminal.show(self._done(), console)
        return text.getvalue()

    def __repr__(self) -> str:
        return str(self) if self._recorder is not None else f"<{MSG_RUNNING}>"

    def _repr_html_(self) -> str:
        # in a frame: the page has a style of its own
        page = html.escape(html_report.render(self._done(), self.title))
        style = "width: 100%; border: 1px solid #d8dee4"
        return f'<iframe srcdoc="{page}" style="{style}" height="{_HEIGHT}"></iframe>'

    def advice(self) -> list[Advice]:
        """The changes that would save most, the first first: at most three."""
        return advice.advice(self._done())

    def save(self, path: str) -> None:
        """Write the page to a file of its own."""
        Path(path).write_text(html_report.render(self._done(), self.title), encoding="utf-8")

    def finish(self, recorder: Recorder) -> None:
        """Take what was recorded: called at the end of the block."""
        self._recorder = recorder

    def _done(self) -> Recorder:
        if self._recorder is None:
            raise RuntimeError(MSG_RUNNING)
        return self._recorder


@contextlib.contextmanager
def recording(title: str = "recorded block") -> Iterator[Report]:
    """Record what runs in the block; its report can be looked at afterwards, also if the block raises.

    ``title`` is the heading of the page.
    """
    report, recorder = Report(title), Recorder()
    recorder.start()
    try:
        yield report
    finally:
        recorder.stop()
        report.finish(recorder)
