"""``tools/replay.py``: the same script gives the same recording, another program is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "replay.py"
SCRIPT = """
import sys
import torch, torch_xla
x = torch.ones(3, 4).to("xla")
print((x * 2 + {constant}).{reduction}().item())
"""


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}
    )


def recorded(folder: Path, name: str, **parts: str) -> Path:
    script, recording = folder / f"{name}.py", folder / f"{name}.json"
    script.write_text(SCRIPT.format(**parts))
    result = replay("record", recording, script)
    assert result.returncode == 0, result.stderr
    assert json.loads(recording.read_text()), result.stdout
    return recording


@pytest.mark.long
def test_equal_scripts_have_equal_recordings_and_others_do_not(tmp_path):
    first = recorded(tmp_path, "first", constant="1", reduction="sum")
    again = recorded(tmp_path, "again", constant="1", reduction="sum")
    other = recorded(tmp_path, "other", constant="1", reduction="amax")
    same = replay("compare", first, again)
    assert same.returncode == 0, same.stdout + same.stderr
    different = replay("compare", first, other)
    assert different.returncode == 1
    lines = different.stdout.splitlines()
    assert [line[0] for line in lines[:-1]] == ["-", "+"]
    assert lines[-1].endswith("2 lines differ")


def test_the_operators_of_a_changed_rule_are_named(tmp_path):
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


def test_an_empty_recording_is_no_proof(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    assert replay("compare", empty, empty).returncode == 2


def test_the_exit_code_is_the_scripts(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    assert replay("record", tmp_path / "out.json", script).returncode == 3
