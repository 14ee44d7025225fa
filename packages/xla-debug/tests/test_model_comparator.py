"""``torch_xla.debug.model_comparator`` and ``frame_parser_util``."""

from __future__ import annotations

import logging
import math
import sys

import pytest
import torch

from torch_xla.debug import frame_parser_util, model_comparator


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    monkeypatch.delenv("MODELCMP_SAVEDIR", raising=False)
    yield
    model_comparator.configure(None)


def record(folder, change=0.0):
    model_comparator.configure(folder)
    for step in (1, 2):
        x = torch.arange(6.0).reshape(2, 3).to("xla") * step
        assert model_comparator.save("x", x, step=step) is x
        model_comparator.save("x", x + (change if step == 2 else 0), step=step)
    model_comparator.save("total", x.sum())


def test_two_runs_are_compared(tmp_path):
    record(tmp_path / "a")
    record(tmp_path / "b", change=0.5)
    names = sorted(p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*.*"))
    assert names == ["step-1/x.0", "step-1/x.1", "step-2/x.0", "step-2/x.1", "total.0"]
    assert model_comparator.compare(tmp_path / "a", tmp_path / "a") == ""
    report = model_comparator.compare(tmp_path / "a", tmp_path / "b", max_diffs=2)
    lines = report.split("\n")
    assert lines[0] == 'Changes in saved tensor "x" with id=1 at step=2'
    assert sorted(line.partition("\t")[2] for line in lines[1:3]) == ["error=0.5"] * 2
    assert lines[3:] == ["  ... aborting after 2 differences", ""]
    assert model_comparator.compare(tmp_path / "a", tmp_path / "b", atol=0.6) == ""
    (tmp_path / "b" / "total.0").unlink()
    report = model_comparator.compare(tmp_path / "b", tmp_path / "a", atol=0.6)
    assert report == f"Mismatch: total.0 not in {tmp_path / 'b'}\n"
    with pytest.raises(NotADirectoryError, match="is not a folder of saved tensors"):
        model_comparator.compare(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ([1.0, math.nan, math.inf], [1.0, math.nan, math.inf], ""),
        ([1.0], [math.inf], "[0]: 1.0 vs. inf\terror=inf\n"),
        ([1.0, 2.0], [math.nan, 2.0], "[0]: 1.0 vs. nan\terror=nan\n"),
        ([[1, 2], [3, 4]], [[1, 2], [5, 5]], "[1, 0]: 3 vs. 5\terror=2.0\n[1, 1]: 4 vs. 5\terror=1.0\n"),
        ([True], [False], "[0]: True vs. False\terror=1.0\n"),
        ([1.0], [[1.0]], "Tensors have different shape: [1] vs. [1, 1]\n"),
        (7.0, 8.0, "[]: 7.0 vs. 8.0\terror=1.0\n"),
    ],
)  # fmt: skip
def test_differences_are_listed(one, other, text):
    found = model_comparator.compare_tensors(torch.tensor(one), torch.tensor(other))
    assert found == text


def test_saving_where_the_environment_says(tmp_path, monkeypatch):
    x = torch.ones(2)
    assert model_comparator.save("x", x) is x
    assert list(tmp_path.iterdir()) == []  # left in a script, it does nothing
    monkeypatch.setenv("MODELCMP_SAVEDIR", str(tmp_path))
    model_comparator.save(None, x)
    line = sys._getframe().f_lineno - 1
    assert [p.name for p in tmp_path.iterdir()] == [f"test_model_comparator.py.l{line}.0"]


STACKS = """\
[TAG _local_scalar_dense From Thread 140]
Python Frames:
  forward (net.py:12)
  main (train.py:34)
C++ Frames:
  at::native::item (aten.cpp:1)
*** End stack trace ***

"""


def test_stacks_are_summed_up(tmp_path, caplog, monkeypatch):
    path = tmp_path / "stacks.txt"
    path.write_text(STACKS * 2 + STACKS.replace("_local_scalar_dense", "nonzero"))
    with caplog.at_level(logging.WARNING, "pt-xla-profiler"):
        frame_parser_util.process_frames(str(path))
    lines = [record.message for record in caplog.records]
    assert lines[0] == lines[-1] == "=" * 80
    assert lines[1] == "Unlowered Op usage summary (more of these ops, lower performance)"
    assert lines[4:9] == [
        "FRAME (count=2):", 'Unlowered Op: "_local_scalar_dense"', "Python Frames:",
        "  forward (net.py:12)", "  main (train.py:34)",
    ]  # fmt: skip
    assert lines.count('Unlowered Op: "nonzero"') == 1 and "aten.cpp" not in "".join(lines)
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(tmp_path / "report.txt"))
    frame_parser_util.process_frames(str(path))
    assert (tmp_path / "report.txt").read_text() == "\n".join(lines) + "\n"
    counted = frame_parser_util.parse_frames(STACKS.splitlines(keepends=True) * 3)
    assert list(counted.values()) == [3]
    assert (
        frame_parser_util.parse_frame_content("  main (train.py:34)\n") == "  main (train.py:34)\n"
    )
    assert frame_parser_util.parse_frame_content("Thread 140\n") is None
