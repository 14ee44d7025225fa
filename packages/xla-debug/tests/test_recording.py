"""``recording()``: the report of a block, as a notebook and ``print`` show it."""

from __future__ import annotations

import html
import sys

import pytest
import torch

import torch_xla
from xla_debug.recording import MSG_RUNNING, recording


def read_in_steps():
    x = torch.randn(64).to("xla")
    total = 0.0
    for _ in range(12):
        y = x * 2
        total += y.sum().item()
        z = (y + 1).cos()
        torch_xla.sync()
    assert z.shape == (64,)
    return sys._getframe().f_code.co_firstlineno + 5


@pytest.fixture(scope="module")
def reported():
    read_in_steps()  # what earlier tests have compiled decides what is advised on programs that are new
    torch_xla.sync()
    with recording("a <cell>") as report:
        line = read_in_steps()
    return report, line


def test_the_report_of_a_block(reported):
    report, line = reported
    first = report.advice()[0]
    assert first.title == "a value was read 12 times in the middle of a step"
    assert first.where == f"{__file__}:{line}"
    text = str(report)
    assert text == repr(report)
    assert "12 steps in" in text and first.title in text


def test_a_notebook_shows_the_page(reported, tmp_path):
    report, _ = reported
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count("<") == 2  # the page is escaped
    report.save(str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text("utf-8")
    assert html.escape(page) in shown
    assert "<h1>a &lt;cell&gt;</h1>" in page


def test_a_block_that_has_not_ended():
    with pytest.raises(ZeroDivisionError), recording() as report:
        assert repr(report) == f"<{MSG_RUNNING}>"
        with pytest.raises(RuntimeError, match="has not ended"):
            report.advice()
        1 / 0  # noqa: B018 - it raises
    assert report.advice() == []


def test_in_a_notebook_nothing_is_shown_by_itself(tmp_path):
    """A real kernel: the report is the cell's result, with a page and a text."""
    nbformat = pytest.importorskip("nbformat", reason="runs a notebook")
    nbclient = pytest.importorskip("nbclient", reason="runs a notebook")
    cell = (
        "import torch, torch_xla\n"
        "from xla_debug.recording import recording\n"
        "with recording('a cell') as report:\n"
        "    x = torch.ones(4).to('xla') + 1\n"
        "    torch_xla.sync()\n"
        "report"
    )
    cells = [
        nbformat.v4.new_code_cell(text)
        for text in (cell, "from xla_debug import recompile\nrecompile.explanations()[0]")
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
    (shown,), (explained,) = (cell.outputs for cell in notebook.cells)
    assert shown.output_type == explained.output_type == "execute_result"
    assert shown.data["text/html"].startswith("<iframe srcdoc=")
    assert "1 step in" in shown.data["text/plain"]
    assert explained.data["text/html"].startswith("<b>first program</b> <code>step_")
