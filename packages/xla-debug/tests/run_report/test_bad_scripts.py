"""Bad scripts with one cause each: the first advice names the cause, the line, the cost and what to write.

``bad_scripts/`` has the scripts; the line to blame ends with ``# HERE``. One process imports everything and is
forked for each script, which is the only way to run two dozen of them in seconds.
"""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path

import pytest

from xla_core.support import forked_programs

FOLDER = Path(__file__).parent / "bad_scripts"
PRELOADED = (
    *forked_programs.PRELOADED, "rich.console", "torch_xla", "xla_debug.cli.run",
    "xla_debug.run_report.advice", "xla_debug.run_report.html_report", "xla_debug.run_report.terminal",
    "xla_debug.run_report.recorder",
)  # fmt: skip
REPORT = """
import contextlib, io, json, os, pathlib
from rich.console import Console
from xla_debug.cli import run
from xla_debug.run_report import advice, html_report, terminal
from xla_debug.run_report.recorder import Recorder

path = pathlib.Path({path!r})
recorder = Recorder()
recorder.start()
with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
    status = run.run_script(str(path), [], False)
recorder.stop()
found = [[a.title, a.where, a.code, a.how, a.cost, a.seconds] for a in advice.advice(recorder)]
text, page = io.StringIO(), html_report.render(recorder, path.stem)
terminal.show(recorder, Console(width=120, file=text))
print(json.dumps([status, found, advice.note(recorder), text.getvalue(), page]))
"""

SECONDS = r"\d+\.\d\d s|\d+\.\d ms"
# the title of the first advice, and what it says to write instead
WANTED = {
    "boolean_mask": (r"the size of masked_select's result depends on the data: it was read 8 times",
                     r"torch\.where"),
    "branch_on_value": (r"Python waited for a value 12 times to take a branch", r"torch\.where\(condition"),
    "changing_number": (r"5 programs compiled: changing constant", r"'p' of aten\.norm.* make it a tensor"),
    "constant_sent": (r"the same values were sent to the device 20 times", r"once, before the loop"),
    "cpu_fallback": (r"aten::linalg_ldl_factor_ex ran 12 times on the CPU", r"operators that the device has"),
    "cpu_for_logging": (r"a value was read 20 times$", r"every 100 steps"),
    "dtype_flips": (r"1 program compiled: dtype", r"torch\.float32 became torch\.float64.*one dtype"),
    "hidden_state_kept": (r"7 programs compiled: backward through former steps", r"hidden\.detach\(\)"),
    "item_in_step": (r"a value was read 20 times in the middle of a step", r"after torch_xla\.sync\(\)"),
    "last_batch": (r"1 program compiled: batch size", r"from 32 to 4.*drop_last=True"),
    "loop_count": (r"5 programs compiled: rounds of a loop", r"in line 13 was recorded 9 times, 7 .*torch\.where"),
    "losses_kept": (r"device memory grows by 13\d\.\d+KB in each step", r"loss\.detach\(\).*no_grad"),
    "missing_sync": (r"60 optimizer steps and no torch_xla\.sync\(\): \d+ operations became one program",
                     r"add torch_xla\.sync\(\) after this line"),
    "model_made_in_first_step": (r"1 program compiled: made in the first step", r"sync\(\) once before the loop"),
    "nonzero": (r"the size of nonzero's result depends on the data: it was read 8 times", r"torch\.where"),
    "print_each_step": (r"a tensor was printed 20 times in the middle of a step", r"after torch_xla\.sync\(\)"),
    "random_in_python": (r"1 program compiled: another branch", r"`if random\.random\(\) < 0\.5:.*torch\.where"),
    "roll_shift": (r"7 programs compiled: changing constant", r"'shifts' of aten\.roll.*index_select"),
    "sequence_length": (r"5 programs compiled: shape of an input", r"dimension 1 went from 24 to 30.*buckets"),
    "several_syncs": (r"3 torch_xla\.sync\(\) in each optimizer step, 2 too many \(line 16, 18\)", r"line 20"),
    "slice_bound": (r"7 programs compiled: Python number in a shape", r"'end' of aten\.slice.*mask"),
    "unique": (r"the size of unique's result depends on the data: it was read 8 times", r"bincount"),
    "unrolled_loop": (r"a loop of 70 rounds is \d+ of \d+ operations of a program", r"scan\.scan"),
}  # fmt: skip
# what these do is right: nothing is to be blamed
FAULTLESS = ("gradient_accumulation", "learning_rate_schedule", "train_and_eval")


@pytest.fixture(scope="module")
def server(folder_of_run):
    """The process that has imported everything."""
    folder = folder_of_run / "bad_scripts"
    folder.mkdir(exist_ok=True)
    found = forked_programs.SharedServer(folder, 1, preloaded=PRELOADED, OMP_NUM_THREADS="1")
    yield found
    found.close()


@pytest.fixture
def report(server, tmp_path):
    """A function that runs a script; its status, and what is said of it."""

    def run(name):
        code = REPORT.format(path=str(FOLDER / f"{name}.py"))
        done = server.run(code, cwd=str(tmp_path), environment=dict(os.environ), timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_each_script_is_judged():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == set(WANTED) | set(FAULTLESS)
    assert len(WANTED) > 20


@pytest.mark.parametrize("name", WANTED)
def test_the_first_advice_is_the_right_one(name, report):
    status, found, _, text, page = report(name)
    assert status == 0
    title, where, code, how, cost, seconds = found[0]
    lines = (FOLDER / f"{name}.py").read_text().split("\n")
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# HERE"))
    assert where == f"{FOLDER / name}.py:{number}", found
    assert code == lines[number - 1].strip()
    wanted_title, wanted_how = WANTED[name]
    assert re.match(wanted_title, title), found
    assert re.search(wanted_how, how), how
    if name == "losses_kept":
        assert re.fullmatch(r"\d\.\d\dMB more after the last step", cost), cost
    else:
        assert seconds > 0
        assert re.match(SECONDS, cost), cost
    assert f"1. {title}" in re.sub(r"\s+", " ", text)
    assert html.escape(title) in page and html.escape(how) in page and len(page) < 100_000
    if (
        name == "dtype_flips"
    ):  # the second program without a flip adds to the gradients: nothing to blame
        assert len(found) == 1, found
    if name == "constant_sent":
        assert cost.endswith(" 20.00MB in all")


@pytest.mark.parametrize("name", FAULTLESS)
def test_what_is_right_is_not_blamed(name, report):
    status, found, note, text, _ = report(name)
    assert status == 0
    assert found == [] and "nothing stands out" in text
    assert re.match(r"[1-3] programs? that every run needs took", note)
