"""Many launches in a row, of jobs that end well and badly: no process, port, descriptor or file is left."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dist_jobs
import dist_vitals
import pytest

from xla_dist.job_health import heartbeats

LAUNCHES = 50
_LISTENING = "0A"


def processes():
    """The ids of all processes that descend from this one or have lost their parent to it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has just ended
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def ports():
    """The listening TCP ports of those processes."""
    inodes = set()
    for pid in processes():
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(str(path.readlink()))
            except OSError:
                continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and f"socket:[{words[9]}]" in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def files():
    """What lies in the folder for temporary files and in shared memory."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return {path for folder in folders if folder.exists() for path in folder.iterdir()}


def is_anothers(path):
    """Whether it is a semaphore that joblib made for a process that runs now and is none of this test's."""
    made_for = re.match(r"sem\.loky-(\d+)-", path.name)
    return (
        bool(made_for)
        and Path("/proc", made_for[1]).exists()
        and int(made_for[1]) not in processes()
    )


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def run(launch, count):
    for number in range(count):
        if number % 5 == 3:
            launch(2, dist_jobs.raises, "new program").error()
        elif number % 5 == 4:
            launch(2, dist_jobs.is_killed, "rendezvous").error()
        else:
            assert launch(2, dist_jobs.nothing).join() == [(0, 2, 2.0), (1, 2, 2.0)]


def check(launch, monkeypatch, tmp_path, count):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run(launch, 1)  # the fork server itself stays
    gc.collect()
    before = processes(), ports(), files(), descriptors()
    run(launch, count)
    assert processes() == before[0]
    assert ports() == before[1]
    left = files() - before[2]
    until = time.monotonic() + 30
    # what other programs have in there comes and goes
    while any(path.exists() and not is_anothers(path) for path in left):
        assert time.monotonic() < until, left
        time.sleep(0.1)
    gc.collect()
    assert descriptors() <= before[3] + 4  # gRPC's poller, which starts when a connection breaks


def test_some_launches_leave_nothing(launch, monkeypatch, tmp_path):
    check(launch, monkeypatch, tmp_path, 5)


@pytest.mark.sweep
def test_fifty_launches_leave_nothing(launch, monkeypatch, tmp_path):
    check(launch, monkeypatch, tmp_path, LAUNCHES)


def test_a_launcher_that_forked_a_job_may_fork_the_next(start_program):
    program = start_program(dist_jobs.clean_environment(2), dist_jobs.forks_again, 2)
    status, text, _ = program.join()
    assert status == 0, text


def test_results_of_processes_that_have_ended_arrive_by_value(launch):
    results = launch(2, dist_jobs.makes, "tensor").join()
    assert [r.tolist() for r in results] == [[[float(i)] * 4] * 3 for i in range(2)]


def test_a_result_that_cannot_be_pickled_is_an_error_where_it_is_asked_for(launch):
    job = launch(2, dist_jobs.makes, "function")
    assert job.launched.join(timeout=150)  # launch() and spawn() need no results
    with pytest.raises(TypeError, match=r"result on ordinal 0 cannot be pickled: .*lambda"):
        job.launched.results()


def test_no_thread_asks_the_coordinator_when_python_ends(launch, tmp_path):
    """One that came back from C++ while the interpreter was taken down aborted a process that had ended well."""
    assert launch(2, dist_vitals.ends_while_it_asks, str(tmp_path)).join() == [None, None]
    for index in range(2):
        names = (tmp_path / str(index)).read_text().split()
        assert "MainThread" in names
        assert not {heartbeats.THREAD, "xla-dist-watchdog"} & set(names), names


def test_none_asks_it_when_a_process_that_failed_ends(start_hosts, tmp_path):
    failing, survivor = start_hosts(2, [0, 1], dist_vitals.fails_while_it_asks, str(tmp_path))
    status, text, _ = failing.join()
    assert status == 1
    assert "ValueError: it fails" in text
    assert survivor.join()[0] != 0
    names = (tmp_path / "0").read_text().split()
    assert "MainThread" in names
    assert not {heartbeats.THREAD, "xla-dist-watchdog"} & set(names), names


@pytest.mark.parametrize(
    "first", ["xla_dist.processes.child_process", "xla_core.extension_api.programs"]
)
def test_a_module_of_ours_may_be_imported_before_torch(first):
    """As in a spawned process whose script imports torch in its functions only."""
    script = f"import {first}, torch; print(torch.distributed.device_mesh.DeviceMesh.__init__.__code__.co_filename)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "xla_core" in done.stdout  # meshes know of the device


def test_jaxlib_warns_of_nothing_that_holds_for_every_job(launch, capfd):
    """It told each launcher that its coordinator's tasks are "recoverable", which this package wants."""
    assert launch(2, dist_jobs.nothing).join() == [(0, 2, 2.0), (1, 2, 2.0)]
    assert "coordination_service" not in capfd.readouterr().err
