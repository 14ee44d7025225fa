"""``torch_xla.launch(..., max_restarts=n)``: jobs that go on after a process has died, and ends that are asked for."""

from __future__ import annotations

import os
import signal
import time

import dist_restarts
import pytest
from dist_jobs import clean_environment
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import torch_xla
from torch_xla.experimental.resume import restart_count


@pytest.fixture
def job_environment(fork_server, monkeypatch):
    """The environment of a job of two CPU processes."""
    wanted = clean_environment(2)
    for name in set(os.environ) - set(wanted) - {"PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)


def run(folder, attempts, how, restarts):
    arguments = (str(folder), attempts, how)
    torch_xla.launch(
        dist_restarts.dies, arguments, start_method="forkserver", max_restarts=restarts
    )


def test_the_job_begins_again_until_it_ends_well(job_environment, tmp_path, caplog):
    run(tmp_path, 2, "kill", 3)
    said = {p.name: p.read_text().rpartition(" ") for p in tmp_path.iterdir()}
    assert sorted(said) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert {value for value, _, _ in said.values()} == {"[4.0, 4.0, 4.0]"}
    # the first attempt compiles, the others find its programs
    assert said["0-0"][2] == "0" and int(said["2-0"][2]) > 0 and int(said["2-1"][2]) > 0
    warnings = [
        r.getMessage() for r in caplog.records if "Starting the job again" in r.getMessage()
    ]
    assert len(warnings) == 2
    assert "attempt 1 of 4 ended after ordinal 1 of 2" in warnings[0] and "SIGKILL" in warnings[0]
    assert "(restart 2 of 3)" in warnings[1]
    assert restart_count() == 0


def test_the_last_attempt_raises(job_environment, tmp_path, caplog):
    with pytest.raises(ProcessRaisedException, match="no such luck"):
        run(tmp_path, 5, "raise", 1)
    assert len(list(tmp_path.iterdir())) == 4 and "no restarts left" in caplog.text


def test_nothing_begins_again_unasked(job_environment, tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run(tmp_path, 1, "kill", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-0", "0-1"]


@pytest.mark.parametrize(("number", "threads"), [(-1, False), (1.5, False), (2, True)])
def test_numbers_are_checked(number, threads):
    with pytest.raises(ValueError, match="max_restarts="):
        torch_xla.launch(print, max_restarts=number, debug_single_process=threads)


def test_torchruns_count_is_known(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count() == 2


def test_a_launcher_that_is_asked_to_end_lets_its_processes_save(start_program, tmp_path):
    """SIGTERM for the launcher: both processes take one checkpoint, at the same step, and it ends by that."""
    program = start_program(
        clean_environment(2), dist_restarts.launches_and_is_terminated, str(tmp_path)
    )
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < until and program.process.is_alive(), program.output.read_text()
        time.sleep(0.05)
    os.kill(program.process.pid, signal.SIGTERM)
    status, text, _ = program.join()
    assert status == 128 + signal.SIGTERM, text
    said = {p.read_text() for p in tmp_path.glob("0-*")}
    assert len(said) == 1 and len(list(tmp_path.glob("0-*"))) == 2
    step, _, values = said.pop().partition(" ")
    assert values == str([float(step)] * 2) and (tmp_path / "run" / step).is_dir()
    assert not (tmp_path / "went on").exists()
