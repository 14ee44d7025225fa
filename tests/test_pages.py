"""Every Python block of the documentation is run, and prints what its page says.

``page_programs`` tells how blocks make programs. Those that are not run have the reason beside them.
"""

from __future__ import annotations

import doctest
import importlib.util
import json
import os

import page_programs
import pytest
from page_programs import PAGES
from source_tree import ROOT

CLEARED = ("XLA_", "PT_XLA_", "CPU_NUM_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD")
READ = {path: page_programs.read(path) for path in PAGES}
PROGRAMS = [program for page in READ.values() for program in page.programs]
GLOO = "[Gloo] Rank "  # what gloo prints where processes meet
SEPARATOR = "-- end of block --\n"


def environment(program):
    """The test's environment without settings of this project, with those of the page."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(CLEARED)}
    return inherited | {"PJRT_DEVICE": "CPU"} | program.environment


def same(expected, printed):
    expected, printed = ("".join(f"{row.rstrip()}\n" for row in text.strip().splitlines())
                         for text in (expected, printed))  # fmt: skip
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)


def without_gloo(text):
    """Without the lines of gloo; where processes print at once, one line has the beginnings of several."""
    kept, pending = [], 0
    for line in text.splitlines(keepends=True):
        pending += line.count(GLOO)
        if pending:
            pending -= 1
        else:
            kept.append(line)
    return "".join(kept)


def test_lines_of_gloo_are_left_out():
    line = f"{GLOO}0 is connected to 1 peer ranks. Expected number of connected peer ranks is : "
    assert without_gloo(f"1\n{line}{line}1\n1\n2\n{line}1\n3\n") == "1\n2\n3\n"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_page_runs(program, program_servers, tmp_path):
    if program.needs is not None and importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    done = next(program_servers).run(
        page_programs.source_of(program, SEPARATOR.strip()),
        cwd=str(tmp_path), environment=environment(program), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed = without_gloo(done.stdout).split(SEPARATOR)
    for block, text in zip(program.blocks, printed, strict=False):
        if block.output is not None:
            place = f"{program.page.relative_to(ROOT)}:{block.line}"
            assert same(block.output, text), f"{place} prints\n{text}"


def test_every_block_has_its_place():
    found = sum(path.read_text("utf-8").count("```python\n") for path in PAGES)
    run = sum(len(program.blocks) for program in PROGRAMS)
    assert run + sum(len(page.not_run) for page in READ.values()) == found
    assert run > found / 2


def test_what_is_not_run_says_why():
    reasons = [reason for page in READ.values() for reason in page.not_run.values()]
    assert all(len(reason.split()) > 2 for reason in reasons)


def test_notebooks_are_their_pages():
    """Their cells are the blocks that ran above, in one process, in the page's order."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.written().items():
        assert path.read_text("utf-8") == text, "python tools/notebooks.py"
        (program,) = READ[ROOT / "docs" / f"{path.stem}.md"].programs
        assert not any(block.before for block in program.blocks)
        found = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert ["".join(c["source"]) for c in found] == [b.code.strip() for b in program.blocks]


def test_another_output_is_noticed():
    assert same("one\n...\nthree", "one\ntwo\nthree\n")
    assert not same("one\n...\nfour", "one\ntwo\nthree\n")
