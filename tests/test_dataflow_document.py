"""docs/dataflow.md: the walk is the one that the two lines take, on the first run and on the next one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "dataflow.md").read_text()
ROW = re.compile(r"^\| \[`([\w/]+\.py)`\]\(\S+\) \| `([\w.]+)` \|", re.M)
BEGIN = "## The walk"
# What only a line's first run enters, and what a later sync enters last.
MAKING = ("dispatch/resolve.py", "dispatch/meta_inference.py", "recording/entry.py")
LAUNCH = ("run_step.py", "program_identity.py", "executable.py")

SCRIPT = """
import sys
import torch, torch_xla

calls = []

def watch(frame, event, _argument):
    if event == "call" and "/xla_" in frame.f_code.co_filename:
        calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

x = torch.randn(3, device="xla")
torch_xla.sync()
for _ in range(2):
    sys.setprofile(watch)
    y = x * 2.5
    print(*(f"{file} {name}" for file, name in calls), sep="\\n")
    print("then")
    calls.clear()
    torch_xla.sync()
    sys.setprofile(None)
    print(*(f"{file} {name}" for file, name in calls), sep="\\n")
    print("then")
    calls.clear()
"""


def walk() -> list[list[tuple[str, str]]]:
    """The rows of the page's two tables: file and function."""
    page = PAGE.partition(BEGIN)[2].partition("\n## ")[0]
    line, sync = page.split("`torch_xla.sync()`:")
    return [ROW.findall(line), ROW.findall(sync)]


@pytest.fixture(scope="module")
def runs() -> list[list[tuple[str, str]]]:
    """What is called by each line, in each of two runs: file and function."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    environment.pop("XLA_PERSISTENT_CACHE_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("then\n")[:4]
    calls = [[line.rsplit(" ", 1) for line in part.splitlines() if " " in line] for part in parts]
    return [[(file, name) for file, name in part] for part in calls]


def positions(rows: list[tuple[str, str]], calls: list[tuple[str, str]]) -> list[int]:
    """Where each row's function, or one defined in it, is called first; -1 where none is."""
    called = [(file, name.partition(".<locals>")[0]) for file, name in calls]
    return [
        next((i for i, (f, n) in enumerate(called) if f.endswith("/" + file) and n == name), -1)
        for file, name in rows
    ]


@pytest.mark.parametrize("part", [0, 1], ids=["line", "sync"])
def test_the_first_run_enters_the_files_in_the_order_of_the_page(runs, part):
    rows = walk()[part]
    order = positions(rows, runs[part])
    assert len(rows) > 6
    assert -1 not in order, [row for row, at in zip(rows, order, strict=True) if at < 0]
    assert order == sorted(order), rows


def test_each_file_comes_once():
    line, sync = walk()
    files = [file for file, _ in (*line, *sync)]
    assert len(set(files)) == len(files)


def test_the_next_run_makes_nothing(runs):
    line, sync = walk()
    rows = [row for row, at in zip(line, positions(line, runs[2]), strict=True) if at < 0]
    assert tuple(file for file, _ in rows) == MAKING
    rows = [row for row, at in zip(sync, positions(sync, runs[3]), strict=True) if at >= 0]
    assert tuple(file.rpartition("/")[2] for file, _ in rows[-3:]) == LAUNCH
    assert len(rows) == 5
