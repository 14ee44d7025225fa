"""``torch_xla.launch(..., max_restarts=n)``: jobs that go on after a process has died; SIGTERM for the launcher."""

from __future__ import annotations

import collections
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import dist_restarts
import pytest
from dist_jobs import clean_environment
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import torch_xla
from torch_xla.experimental.resume import restart_count
from xla_core.testing.internals import free_port


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
    # the first attempt compiles, where one process may find what the other has stored; the others load all of it
    programs = {name: tuple(map(int, counts.split("/"))) for name, (_, _, counts) in said.items()}
    assert programs["0-0"][1] + programs["0-1"][1] > 0, programs
    assert all(programs[name] == (sum(programs["0-0"]), 0) for name in ("2-0", "2-1")), programs
    warnings = [
        r.getMessage() for r in caplog.records if "Starting the job again" in r.getMessage()
    ]
    assert len(warnings) == 2
    assert "attempt 1 of 4 failed: ordinal 1 of 2" in warnings[0] and "SIGKILL" in warnings[0]
    assert "(restart 2 of 3)" in warnings[1]
    assert restart_count() == 0


def test_a_fault_on_purpose_comes_once_and_the_warning_names_its_report(
    job_environment, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("XLA_DIST_FAULT", "kill:1:1")
    monkeypatch.setenv("XLA_FLIGHT_DIR", str(tmp_path / "flight"))
    (tmp_path / "said").mkdir()
    run(tmp_path / "said", 0, "", 1)
    assert sorted(p.name for p in (tmp_path / "said").iterdir()) == ["1-0", "1-1"]
    (page,) = (tmp_path / "flight").glob("*/end/job.txt")
    assert (
        f"was killed by signal SIGKILL; the other processes were ended\nflight report: {page}\n"
        in (caplog.text)
    )


def test_the_last_attempt_raises(job_environment, tmp_path, caplog):
    with pytest.raises(ProcessRaisedException, match="no such luck"):
        run(tmp_path, 5, "raise", 1)
    assert len(list(tmp_path.iterdir())) == 4 and "no restarts are left" in caplog.text


def test_nothing_begins_again_unasked(job_environment, tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run(tmp_path, 1, "kill", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-0", "0-1"]


def losses(folder):
    """(attempt, step, loss) of every step that was finished since the last look, in order."""
    lines = (folder / "losses").read_text().splitlines()
    (folder / "losses").unlink()
    return [(int(a), int(s), loss) for a, s, loss in map(str.split, lines)]


def train(folder, *arguments, restarts=0):
    folder.mkdir(exist_ok=True)
    torch_xla.launch(
        dist_restarts.trains,
        (str(folder), *arguments),
        start_method="forkserver",
        max_restarts=restarts,
    )
    return losses(folder)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Compiled programs that the jobs of this file have in common, in all of pytest's processes."""
    folder = tmp_path_factory.getbasetemp()
    return str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "programs")


@pytest.mark.parametrize(("sharded", "asynchronous"), [(False, True), (True, False)])
def test_a_run_that_is_killed_ends_with_the_losses_of_one_that_was_not(
    job_environment, monkeypatch, tmp_path, programs, sharded, asynchronous
):
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", programs)
    steps, dice = 8, random.Random(5)  # an epoch has 5
    whole = train(tmp_path / "whole", steps, None, sharded)
    wanted = {step: loss for _, step, loss in whole}
    assert sorted(wanted) == list(range(steps)) and len(set(wanted.values())) == steps
    kills = {n: (dice.randrange(2), 2 + 3 * n, dice.random() * 0.05) for n in range(2)}
    found = train(tmp_path / "killed", steps, kills, sharded, asynchronous, restarts=3)
    assert {step: loss for _, step, loss in found} == wanted
    assert all(wanted[step] == loss for _, step, loss in found)  # the repeated ones, too
    assert {attempt for attempt, _, _ in found} == {0, 1, 2}
    times = collections.Counter(step for _, step, _ in found)
    # of two kills: the step that is not saved yet, and, in the background, the one that is being written
    assert len(found) <= steps + 2 * (1 + asynchronous) and max(times.values()) <= 2, times


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_with_more_and_with_fewer_processes(
    job_environment, monkeypatch, tmp_path, programs, sharded
):
    """Two processes, then three, one of which is killed, then two: the same batches, summed in other groups."""
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", programs)
    options = (sharded, True, 0.0)
    wanted = [loss for _, _, loss in train(tmp_path / "two", 6, None, *options)]
    found = {}
    for count, steps, kills in ((2, 2, None), (3, 4, {0: (2, 3, 0.0)}), (2, 6, None)):
        monkeypatch.setenv("CPU_NUM_DEVICES", str(count))
        for _, step, loss in train(tmp_path / "changing", steps, kills, *options, restarts=1):
            found.setdefault(step, float.fromhex(loss) / count)
    expected = [float.fromhex(loss) / 2 for loss in wanted]
    assert [found[step] for step in range(6)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_that_loses_a_process_and_goes_on_without_it_has_the_bits_of_one_that_lost_none(
    job_environment, monkeypatch, tmp_path, programs, sharded
):
    """Four processes, one of which is killed, then three; and four, then three from that step on: with dropout."""
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", programs)
    steps = 6  # an epoch has 5
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    with pytest.raises(ProcessExitedException, match="ordinal 3 of 4"):
        train(tmp_path / "killed", steps, {0: (3, 3, 0.0)}, sharded, False)
    before = losses(tmp_path / "killed")
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    after = train(tmp_path / "killed", steps, None, sharded, False)
    changed_at = after[0][1]
    assert 3 <= changed_at < steps and len(before) - changed_at <= 1  # at most one step again

    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    wanted = train(tmp_path / "whole", changed_at, None, sharded, False)
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    wanted += train(tmp_path / "whole", steps, None, sharded, False)
    assert [step for _, step, _ in wanted] == list(range(steps))
    assert before[:changed_at] + after == wanted
    assert len({loss for _, _, loss in wanted}) == steps


@pytest.mark.parametrize(("number", "threads"), [(-1, False), (1.5, False), (2, True)])
def test_numbers_are_checked(number, threads):
    with pytest.raises(ValueError, match="max_restarts="):
        torch_xla.launch(print, max_restarts=number, debug_single_process=threads)


def test_launchers_of_two_hosts_begin_again_together(start_program, tmp_path):
    """Each starts its own process again; the one that runs no coordinator finds the new one."""
    address = f"127.0.0.1:{free_port()}"
    programs = []
    for index in range(2):
        place = {"XLA_COORDINATOR_ADDRESS": address, "XLA_PROCESS_COUNT": "2"}
        environment = clean_environment(1, **place, XLA_PROCESS_INDEX=str(index))
        programs.append(start_program(environment, dist_restarts.launches_again, str(tmp_path)))
    for program in programs:
        status, text, _ = program.join()
        assert status == 0, text
    said = {p.name: p.read_text().rpartition(" ")[0] for p in tmp_path.iterdir() if "-" in p.name}
    assert sorted(said) == ["0-0", "0-1", "1-0", "1-1"]
    assert set(said.values()) == {"[4.0, 4.0, 4.0]"}


def test_one_process_without_room_on_its_disk(job_environment, tmp_path):
    """Every process raises, the earlier checkpoint is there, and the next one is taken again."""
    torch_xla.launch(dist_restarts.fills_a_disk, (str(tmp_path),), start_method="forkserver")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["1", "2"]
    for index in range(2):
        text = (tmp_path / f"0-{index}").read_text()
        assert text.startswith("27 ") and "of step 2 could not be written" in text, text
        assert "File too large" in text and "of steps [1], have not changed" in text, text


UNDER_TORCHRUN = """
import sys
import torch_xla
from dist_restarts import trains
torch_xla.launch(trains, (sys.argv[1], 5, {0: (1, 2, 0.0)}))
"""


def test_torchrun_starts_the_processes_again(job_environment, monkeypatch, tmp_path, programs):
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", programs)
    wanted = {step: loss for _, step, loss in train(tmp_path / "whole", 5)}
    script, folder = tmp_path / "script.py", tmp_path / "killed"
    script.write_text(UNDER_TORCHRUN)
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*torchrun, *options, script, folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses(folder)
    assert {attempt for attempt, _, _ in found} == {0, 1} and len(found) <= 7
    assert all(wanted[step] == loss for _, step, loss in found)
    assert {step for _, step, _ in found} == set(wanted)


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


PRELUDE = """
import os
from pathlib import Path
import torch
STEPS = int(os.environ["STEPS"])
data = torch.arange(2048.0).reshape(512, 4) / 2048

def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)

def train_step(model, optimizer, schedule, batch):
    optimizer.zero_grad()
    loss = model(batch).pow(2).sum()
    loss.backward()
    xm.optimizer_step(optimizer)
    schedule.step()
    with open(f"losses-{xm.get_ordinal()}", "a") as file:
        file.write(f"{loss.item()}\\n")
"""


def test_the_documents_example_goes_on_where_it_was(job_environment, monkeypatch, tmp_path):
    text = (Path(__file__).parents[4] / "docs" / "restart.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    script = tmp_path / "script.py"
    script.write_text(PRELUDE.replace("\\\\n", "\\n") + example)
    for steps in (1, 4):
        monkeypatch.setenv("STEPS", str(steps))
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [p.name for p in (tmp_path / "checkpoints" / "run").iterdir()] == ["0"]
    for ordinal in range(2):  # one step, and then three
        lines = (tmp_path / f"losses-{ordinal}").read_text().splitlines()
        assert len(lines) == 4 == len(set(lines)), lines
