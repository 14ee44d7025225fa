"""A process that can never come ends the job within LIMIT; one that is slow lives, and is named.

Measured on two cores, from the start of the job to its end: locked threads 6 to 8 s, a circle of three
5 s, a frozen process 4 s, a killed one without a launcher 2 s. Whoever waits for a process that was never
started, or has ended before it used a device, ends after XLA_DIST_ABSENT_TIMEOUT and what starting takes: the
default of 8 s would leave too little of LIMIT for that while other tests run, so these jobs have 4, and the
default is tested in xla-core, without a job.
"""

from __future__ import annotations

import gc
import re
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import dist_jobs
import dist_vitals
import pytest
import torch
from dist_jobs import clean_environment
from torch.multiprocessing import ProcessRaisedException

from xla_dist.job_health import thread_states
from xla_dist.job_health.bounded_wait import circle
from xla_dist.job_health.failure_reports import Waiting
from xla_dist.job_health.thread_states import COMPUTES, INPUT, LOCKED, SLEEPS
from xla_dist.processes.thread_replicas import Team

LIMIT = 10.0


@pytest.mark.parametrize(
    ("how", "where", "what", "limits"),
    [
        ("one lock", "rendezvous", "rendezvous 'never reached by all'", {}),
        (
            "two locks",
            "known program",
            "all_reduce sum of float32[4]",
            {"XLA_DIST_STUCK_TIMEOUT": "1"},
        ),
        ("a worker", "the end", "the end of the job", {"XLA_DIST_STUCK_TIMEOUT": "1"}),
    ],
)
def test_a_process_whose_threads_are_locked_never_arrives(launch, how, where, what, limits):
    job = launch(2, dist_vitals.locks_up, how, where, **limits)
    error = job.error()
    assert isinstance(error, ProcessRaisedException)
    assert error.error_index == 1
    text = str(error)
    assert f"ordinal 1 never arrives at {what}" in text
    assert "where ordinal 0 waits for it" in text
    assert "in locks_up" in text  # its stack
    assert ("Thread 'Thread-" in text) == (how != "one lock")
    assert job.seconds < LIMIT


def test_who_is_slow_lives_and_is_named_with_where_it_is(launch):
    job = launch(
        2,
        dist_vitals.is_slow_in_many_ways,
        2.6,
        XLA_DIST_WARN_AFTER="2",
        XLA_DIST_STUCK_TIMEOUT="0",
    )
    patient, _ = job.join()
    lines = dict(
        re.findall(
            r"^rendezvous '(.*?)': ordinal 1 has not arrived for [23] s; (.*)$", patient, re.M
        )
    )
    assert list(lines) == list(dist_vitals.SLOW)
    expected = {
        "sleeps": (SLEEPS, "in _sleeps: time.sleep(seconds)"),
        "computes": (COMPUTES, "in _computes"),
        "a process": (INPUT, "in _waits_for_a_process"),
        "input": (INPUT, "in _waits_for_input: os.read(end, 1)"),
        "a sleeper": (LOCKED, "in _waits_for_a_sleeper: found.wait()"),
        "an alarm": (LOCKED, "in _has_an_alarm: lock.acquire()"),
        "the interpreter": ("keeps its interpreter busy", "it does not say where it is"),
    }
    for name, parts in expected.items():
        for part in parts:
            assert part in lines[name], name


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ({0: Waiting("a", (1,)), 1: Waiting("b", (0,))}, [0, 1]),
        ({0: Waiting("a", (1,)), 1: Waiting("b", (2,)), 2: Waiting("c", (0,))}, [0, 1, 2]),
        ({0: Waiting("a", (3, 1)), 1: Waiting("b", (0,))}, [0, 1]),
        ({0: Waiting("a", (1,)), 1: Waiting("a", (0,))}, []),  # about to meet
        ({0: Waiting("a", (1,)), 1: Waiting("a", (2,))}, []),  # both wait for a slow one
        ({0: Waiting("a", (1,)), 1: Waiting("b", (2,)), 2: Waiting("c", (1,))}, []),  # others' affair
    ],
)  # fmt: skip
def test_a_circle_is_found(waiting, expected):
    assert circle(0, waiting) == expected


def test_looking_at_the_threads_leaves_nothing_to_the_collector():
    """A cycle would hold what the user's frames hold, as full parameters."""
    own = thread_states.ThreadWatch()

    def look():
        assert own.look().stack

    look()  # reads source lines into a cache, once
    gc.collect()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert gc.collect() == 0


def test_a_main_thread_that_naps_sleeps_whenever_it_is_looked_at():
    """It may wake up just then, and wait for the interpreter's lock or run for a moment."""
    watches = [thread_states.ThreadWatch() for _ in range(50)]
    looks: list[str] = []
    thread = threading.Thread(target=lambda: looks.extend(watch.look().doing for watch in watches))
    thread.start()
    while thread.is_alive():
        time.sleep(0.002)
    assert set(looks) == {SLEEPS}


def test_a_circle_of_three_ends(launch):
    job = launch(3, dist_vitals.goes_around)
    text = str(job.error())
    assert "which waits at rendezvous 'of " in text
    assert "all wait for ever" in text
    assert job.seconds < LIMIT


def test_a_key_that_nobody_sets_any_more(launch):
    job = launch(2, dist_vitals.waits_for_a_key)
    text = str(job.error())
    assert "ordinal 0 waits for the keys" in text
    assert "of nobody" in text
    assert "all other processes have finished" in text
    assert job.seconds < LIMIT


def test_a_frozen_process_ends_the_job(launch):
    job = launch(2, dist_vitals.is_stopped, "rendezvous")
    text = str(job.error())
    assert re.search(
        "ordinal 1 of the job is frozen: for [34] s its process has been stopped", text
    )
    assert "rendezvous 'never reached by all'" in text
    assert job.seconds < LIMIT


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_process_of_another_host_is_known_by_its_signs_of_life(start_hosts, how):
    limit = {"XLA_DIST_FAILURE_TIMEOUT": "3"}
    survivor, _ = start_hosts(2, [0, 1], dist_vitals.ends_on_another_host, how, **limit)
    status, text, seconds = survivor.join()
    assert status not in (0, None)
    assert "ordinal 1 of the job has died without a word" in text
    assert "no sign of life for 3 s (XLA_DIST_FAILURE_TIMEOUT)" in text
    assert "rendezvous 'never reached by all'" in text
    assert seconds < LIMIT


def test_who_does_not_answer_does_not_keep_the_news_from_the_others(start_hosts):
    survivor, busy, culprit = start_hosts(3, [0, 1, 2], dist_vitals.fails_while_one_is_busy)
    assert culprit.join()[0] == 1
    status, text, _ = survivor.join()
    assert status not in (0, None)
    assert "ordinal 2 failed" in text
    assert "ValueError: the third process gives up" in text
    assert busy.process.is_alive()  # the survivor did not wait for it


# --- processes that never start -----------------------------------------------------------------

_MEETS = """
import os, time
from xla_core.extension_api import jobs, plugins
print(time.monotonic(), flush=True)
jobs.connect(plugins.job_of("CPU", os.environ))
print("met")
"""


def _start(kind, index, port, *before, **extra):
    """Process ``index`` of two, started as a user's shell or torchrun does."""
    if kind == "hosts":
        job = {"XLA_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "XLA_PROCESS_COUNT": "2"}
        job["XLA_PROCESS_INDEX"] = str(index)
    else:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        job |= {"RANK": str(index), "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": "2"}
    return subprocess.Popen(
        [*before, sys.executable, "-c", _MEETS], env=clean_environment(1, **job, **extra),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_process_that_was_never_started_on_this_host_is_named():
    limit = {"XLA_DIST_ABSENT_TIMEOUT": "4"}
    alone = {
        ("hosts", 1): _start("hosts", 1, _free_port(), **limit),
        ("torchrun", 0): _start("torchrun", 0, _free_port(), **limit),
    }
    for (kind, index), process in alone.items():
        began, _, text = process.communicate(timeout=60)[0].partition("\n")
        assert process.returncode == 70, text
        assert time.monotonic() - float(began) < LIMIT
        variable = "RANK" if kind == "torchrun" else "XLA_PROCESS_INDEX"
        assert f"process {index} of 2 ends. It waited at" in text
        assert f"no process with {variable}={1 - index} runs on this host" in text


def test_a_process_that_starts_slowly_is_waited_for():
    port, limit = _free_port(), {"XLA_DIST_ABSENT_TIMEOUT": "1"}
    first = _start("hosts", 0, port, **limit)
    second = _start("hosts", 1, port, "sh", "-c", 'sleep 4; exec "$@"', "sh", **limit)
    for process in (first, second):
        assert process.communicate(timeout=60)[0].splitlines()[1:] == ["met"]
        assert process.returncode == 0


def _coordinators(parent):
    """The processes that are coordinators of the job whose process 0 has the number ``parent``.

    Other jobs on this machine, as those of tests that run beside this one, have theirs.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().rstrip(b"\0").split(b"\0")
            if b"xla_core.jax_bridge.coordinator_process" in command and int(command[-1]) == parent:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_coordinator_outlives_process_0_and_nobody_else(start_hosts):
    culprit, survivor = start_hosts(
        2, [0, 1], dist_jobs.kills_its_coordinator, "rendezvous", XLA_DIST_FAILURE_TIMEOUT="2"
    )
    culprit.process.join(60)
    killed = time.monotonic()
    served = _coordinators(culprit.process.pid)
    assert served
    status, text, _ = survivor.join()
    assert status == 70
    assert "ordinal 0 of the job has died without a word" in text
    while any(Path(f"/proc/{pid}").exists() for pid in served):
        assert time.monotonic() - killed < LIMIT
        time.sleep(0.05)


def test_torch_is_a_library_wherever_it_lies():
    def call():
        raise KeyError

    code = call.__code__.replace(co_filename="/elsewhere/torch/_ops.py")
    of_torch = types.FunctionType(code, {"__name__": "torch._ops", "KeyError": KeyError})
    with pytest.raises(KeyError) as caught:
        of_torch()
    assert thread_states.place_of_error(caught.tb).startswith(__file__)


@pytest.mark.parametrize("file", [torch.__file__, "/elsewhere/site-packages/made.py"])
def test_generated_code_of_a_library_is_no_line_of_the_users(file):
    """As the methods that dataclasses makes by exec; libraries may lie in several folders."""

    def call():
        raise KeyError

    made = {"__file__": file, "__name__": "of_a_library", "KeyError": KeyError}
    of_a_library = types.FunctionType(call.__code__.replace(co_filename="<string>"), made)
    with pytest.raises(KeyError) as caught:
        of_a_library()
    assert thread_states.place_of_error(caught.tb).startswith(__file__)


def test_one_thread_for_two_devices_is_told_that_nobody_comes(monkeypatch, caplog):
    """It waited half an hour in silence."""
    monkeypatch.setenv("XLA_DIST_WARN_AFTER", "0")
    monkeypatch.setenv("XLA_DIST_WAIT_TIMEOUT", "1")
    with pytest.raises(RuntimeError, match="ordinal 1 does not arrive: for 1 s"):
        Team([0, 1]).exchange(0, "all_reduce", None, lambda values: values)
    (record,) = caplog.records
    assert "ordinal 0 has waited at all_reduce for the threads of ordinal 1" in record.message
