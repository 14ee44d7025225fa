"""``xla-debug flight``: of a process that runs, by its number; of reports that are there, by name."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from xla_core.support import flight_files
from xla_debug.cli import flight, main

_TRAINS = """
import time
import torch, torch_xla
x = torch.ones(4, device="xla")
for _ in range(12):
    x = x + 1
    torch_xla.sync()
x.cpu()
print("trained", flush=True)
while True:
    time.sleep(0.1)  # for ever
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLIGHT_DIR", str(tmp_path / "flight"))
    return tmp_path / "flight"


def test_a_process_that_runs_is_asked_and_goes_on(folder, tmp_path, capsys):
    pytest.importorskip("xla_dist")
    script = tmp_path / "hangs.py"
    script.write_text(_TRAINS)
    shell = subprocess.Popen(  # the launcher of the process that answers
        ["sh", "-c", f"{sys.executable} {script}; true"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PJRT_DEVICE": "CPU"},
    )  # fmt: skip
    try:
        assert shell.stdout.readline() == "trained\n"
        assert main(["flight", str(shell.pid)]) == 0
        text = capsys.readouterr().out
        assert "1 of 1 processes" in text
        assert f"ordinal 0 is at {script}:11 in <module>: time.sleep(0.1)" not in text
        assert f"at {script}:11 in <module>: time.sleep(0.1)" in text
        assert "steps: 12" in text
        assert "fetch float32[4] 16 bytes" in text
        assert shell.poll() is None
        page = next(folder.glob("*/asked-*/job.html")).read_text()
        assert "<h2>Who waits for whom</h2>" in page
        assert "time.sleep(0.1)" in page
        assert main(["flight"]) == 0
        assert "/asked-" in capsys.readouterr().out
    finally:
        for pid in flight._descendants(shell.pid):
            os.kill(pid, 9)
        shell.wait()
        shell.stdout.close()


def test_who_has_no_handler_is_not_asked(folder, capsys):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert main(["flight", str(sleeper.pid)]) == 1
        assert "do not use an xla device" in capsys.readouterr().err
        time.sleep(0.1)
        assert sleeper.poll() is None  # the signal would have ended it
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_of_another_user_is_named(folder, capsys, monkeypatch):
    """Anybody may read whether it handles the signal, but not send it."""

    def refuse(pid, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(flight, "_answers", lambda pid: True)
    monkeypatch.setattr(flight.os, "kill", refuse)
    assert main(["flight", str(os.getpid())]) == 1
    assert "belong to another user" in capsys.readouterr().err


def test_reports_are_found_by_name(folder, capsys):
    assert main(["flight"]) == 1
    assert f"no reports in {folder}" in capsys.readouterr().err
    one = {
        "ordinal": 0, "count": 2, "pid": 7, "host": "here", "time": 50.0, "reason": "a <reason>",
        "error": "ValueError: <no>", "broke": None, "finished": False, "place": "a.py:1", "doing": "",
        "stack": "a stack", "waiting": None, "inside": None, "meets": [], "writes": [], "programs": {},
        "launched": {"all": 0, "with": {}}, "seen": {}, "collectives": [],
        "records": [["launch", 49.0, None, "MainThread", "step", 0]],
        "steps": {"ended": 0, "since": 0.0, "usual": None, "own": None},
    }  # fmt: skip
    page = flight_files.write("a job", "end", one, {})
    for name in ("a job", "a job/end", str(page), str(page.parent)):
        assert main(["flight", name]) == 0
        assert "ordinal 0 failed at a.py:1: ValueError: <no>" in capsys.readouterr().out
    html = (page.parent / "job.html").read_text()
    assert "a &lt;reason&gt;" in html
    assert "launch step has not ended" in html
    assert main(["flight", "another"]) == 1
    assert "there is no report of another" in capsys.readouterr().err
