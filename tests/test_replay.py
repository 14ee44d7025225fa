"""``tools/replay.py``: the same script gives the same recording, another program is reported."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Replay = Callable[..., subprocess.CompletedProcess[str]]

TOOL = Path(__file__).parents[1] / "tools" / "replay.py"
SCRIPT = """
import sys
import torch, torch_xla
x = torch.ones(3, 4).to("xla")
print((x * 2 + {constant}).{reduction}().item())
"""


@pytest.fixture
def replay(run_file: Replay) -> Replay:
    """Run the tool with arguments; sets are in another order each time."""
    return functools.partial(run_file, TOOL)


def recorded(replay: Replay, folder: Path, name: str, **parts: str) -> Path:
    script, recording = folder / f"{name}.py", folder / f"{name}.json"
    script.write_text(SCRIPT.format(**parts))
    result = replay("record", recording, script)
    assert result.returncode == 0, result.stderr
    assert json.loads(recording.read_text()), result.stdout
    return recording


def test_equal_scripts_have_equal_recordings_and_others_do_not(replay, tmp_path):
    first = recorded(replay, tmp_path, "first", constant="1", reduction="sum")
    again = recorded(replay, tmp_path, "again", constant="1", reduction="sum")
    other = recorded(replay, tmp_path, "other", constant="1", reduction="amax")
    same = replay("compare", first, again)
    assert same.returncode == 0, same.stdout + same.stderr
    different = replay("compare", first, other)
    assert different.returncode == 1
    lines = different.stdout.splitlines()
    assert [line[0] for line in lines[:-1]] == ["-", "+"]
    assert lines[-1].endswith("2 lines differ")


def test_the_operators_of_a_changed_rule_are_named(replay, tmp_path):
    def program(step: str, module: str, *operators: str) -> dict[str, object]:
        return {
            "step": step,
            "operations": 3,
            "modules": [module],
            "during": "",
            "operators": operators,
        }

    before = [
        program("1", "a", "mul", "add"),
        program("2", "b", "add", "div"),
        program("3", "c", "mul"),
    ]
    after = [before[0], program("2", "other", "add", "div"), program("4", "c", "div")]
    for name, recording in (("before", before), ("after", after)):
        (tmp_path / name).write_text(json.dumps(recording))
    compared = replay("compare", tmp_path / "before", tmp_path / "after")
    assert "same step, other program: div\n" in compared.stdout
    assert compared.stdout.count("other program") == 1


def test_an_empty_recording_is_no_proof(replay, tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    assert replay("compare", empty, empty).returncode == 2


def test_the_exit_code_is_the_scripts(replay, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    assert replay("record", tmp_path / "out.json", script).returncode == 3
