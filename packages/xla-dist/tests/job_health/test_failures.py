"""A process that raises, is killed, never comes or runs something else ends the job, and is named.

LIMIT is the time within which the whole job is over, its start included. Measured on two busy cores:
an exception 0.9 to 3.4 s, a kill 1.2 to 2.6 s, a replica that has finished early 2.1 s, one that runs
another program 1.4 to 5.1 s, two that wait for each other at different places 6.0 to 6.5 s; without a
launcher an exception 2 to 5 s, a kill 8.1 s (6 s without a sign of life make a process dead), a killed
process 0 likewise. Processes that are alive and never arrive: test_never_arrives.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import dist_jobs
import pytest
from dist_jobs import clean_environment
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

LIMIT = 10.0
PLACES = ["rendezvous", "known program", "new program", "python"]


@pytest.mark.parametrize("where", PLACES)
def test_an_exception_ends_the_job_and_is_shown(launch, where):
    job = launch(2, dist_jobs.raises, where)
    error = job.error()
    assert isinstance(error, ProcessRaisedException)
    assert error.error_index == 1
    assert "ordinal 1 of 2" in str(error)
    assert "in raises" in str(error)  # the culprit's traceback
    assert "ValueError: the second process gives up" in str(error)
    assert job.seconds < LIMIT


@pytest.mark.parametrize("where", PLACES)
def test_a_killed_process_ends_the_job_and_is_named(launch, where):
    job = launch(2, dist_jobs.is_killed, where)
    error = job.error()
    assert isinstance(error, ProcessExitedException)
    assert (error.error_index, error.signal_name) == (1, "SIGKILL")
    assert "ordinal 1 of 2" in str(error)
    assert job.seconds < LIMIT


@pytest.mark.parametrize("where", PLACES[:3])
def test_a_process_that_finishes_too_early_is_named(launch, where):
    job = launch(2, dist_jobs.misses, where)
    text = str(job.error())
    assert "ordinal 1 never" in text
    assert "it has finished" in text
    name = "rendezvous 'never reached" if where == "rendezvous" else "all_reduce sum of float32["
    assert name in text
    assert job.seconds < LIMIT


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("new program", "all_reduce sum of float32[6]", "all_reduce sum of float32[7]"),
        ("new reduction", "all_reduce sum of float32[3]", "all_reduce max of float32[3]"),
        ("known programs", "all_reduce sum of float32[4]", "all_reduce sum of float32[5]"),
        # gloo aborts one process before it can say anything
        ("known branch", "all_reduce sum of float32[4]", "all_reduce sum of float32[5]"),
        ("tags", "'place 0'", "'place 1'"),
    ],
)
def test_different_programs_are_shown_side_by_side(launch, how, first, second):
    job = launch(2, dist_jobs.differs, how)
    text = str(job.error())
    assert first in text
    assert second in text
    assert "ordinal 0" in text
    assert "ordinal 1" in text
    assert "in the same order" in text
    if how != "tags":  # where the collective was called, not where the step ended
        here = dist_jobs.reduced.__code__
        assert text.count(f"{here.co_filename}:{here.co_firstlineno + 2} in reduced, after") == 2
    assert job.seconds < LIMIT


def test_two_that_wait_for_each_other_at_different_places_end(launch):
    job = launch(2, dist_jobs.differs, "crossed")
    text = str(job.error())
    assert "rendezvous 'only here'" in text
    assert "all_reduce sum of float32" in text
    assert job.seconds < LIMIT


@pytest.mark.parametrize("where", PLACES[:2])
def test_a_slow_process_is_waited_for_with_a_warning(launch, where):
    # longer than a dead one may be silent
    limits = {"XLA_DIST_WARN_AFTER": "1", "XLA_DIST_FAILURE_TIMEOUT": "2"}
    job = launch(2, dist_jobs.is_slow, where, 4.0, **limits)
    patient, slow = job.join()
    assert patient.count("\n") == 1
    assert "ordinal 1 has not" in patient
    assert slow == ""


@pytest.mark.parametrize("where", PLACES[:2])
def test_patience_has_an_end(launch, where):
    job = launch(2, dist_jobs.hangs, where, XLA_DIST_WAIT_TIMEOUT="2")
    text = str(job.error())
    assert "ordinal 1 has not" in text
    assert "XLA_DIST_WAIT_TIMEOUT" in text
    assert "in hangs" in text  # its stack
    assert job.seconds < LIMIT


# --- processes that no launcher of ours started -------------------------------------------------


@pytest.mark.parametrize("where", ["rendezvous", "known program"])
def test_hosts_end_when_a_process_raises(start_hosts, where):
    survivor, culprit = start_hosts(2, [0, 1], dist_jobs.raises, where)
    status, text, seconds = survivor.join()
    assert status not in (0, None)
    assert "ordinal 1 failed" in text
    assert "ValueError: the second process gives up" in text
    assert seconds < LIMIT
    assert culprit.join()[0] == 1


@pytest.mark.parametrize(
    ("where", "limit"), [("rendezvous", {}), ("known program", {"XLA_DIST_FAILURE_TIMEOUT": "2"})]
)
def test_hosts_end_when_a_process_is_killed(start_hosts, where, limit):
    survivor, _ = start_hosts(2, [0, 1], dist_jobs.is_killed, where, **limit)
    status, text, seconds = survivor.join()
    assert status not in (0, None)
    # also where a collective was under way, which fails in gloo's words
    assert "ordinal 1 of the job has died without a word" in text
    assert seconds < LIMIT


def test_hosts_end_when_the_coordinator_is_killed(start_hosts):
    _, survivor = start_hosts(2, [0, 1], dist_jobs.kills_its_coordinator, "rendezvous")
    status, text, seconds = survivor.join()
    assert status not in (0, None)
    assert "ordinal 0 of the job has died without a word" in text
    assert "waited at rendezvous 'never reached by all'" in text
    assert seconds < LIMIT


@pytest.mark.parametrize("present", [0, 1])
def test_a_host_that_never_arrives_is_named(start_hosts, present):
    (alone,) = start_hosts(2, [present], dist_jobs.nothing, XLA_DIST_START_TIMEOUT="3")
    status, text, seconds = alone.join()
    assert status not in (0, None)
    if present == 0:
        assert "waited 3 s (XLA_DIST_START_TIMEOUT) for all 2 processes" in text
        assert "Some timed out task names:\n1\n" in text
    else:
        assert "could not reach the coordinator" in text
        assert "Process 0 runs it" in text
    assert seconds < LIMIT


def test_no_loaders_worker_survives(launch, tmp_path):
    path = tmp_path / "workers of"
    assert "in the middle of the loop" in str(
        launch(2, dist_jobs.raises_in_a_loop, str(path)).error()
    )
    workers = [int(pid) for i in range(2) for pid in Path(f"{path} {i}").read_text().split()]
    assert len(workers) == 4
    until = time.monotonic() + LIMIT
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_no_process_survives_its_launcher(start_program, tmp_path):
    pids = tmp_path / "pids"
    environment = clean_environment(2)
    launcher = start_program(environment, dist_jobs.launches, str(pids), dist_jobs.waits, "python")
    until = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1.0)
    launcher.process.kill()
    killed = time.monotonic()
    children = [int(pid) for pid in pids.read_text().split()]
    while any(_runs(pid) for pid in children):
        assert time.monotonic() - killed < LIMIT
        time.sleep(0.05)


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # dead, and nobody has asked for its status
