"""Stopped processes are told from those that stand still for a moment; ended ones are missed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from xla_core.extension_api import jobs
from xla_dist.job_health import local_processes


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as running:
        yield running
        running.kill()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def go_on(process):
    process.send_signal(signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)


@pytest.fixture
def seen(process, monkeypatch):
    """Looks of ordinal 0 at ordinal 1, which is ``process``; what they saw."""
    names = {"0": os.getpid(), "1": process.pid}
    told = {name: f"{local_processes._system()} {pid}".encode() for name, pid in names.items()}
    monkeypatch.setattr(jobs, "published", lambda folder: told)
    watched = local_processes.LocalProcesses(2)

    def look():
        watched.look()
        return watched.frozen(), watched.gone()

    return look


def test_a_stopped_process_is_told_from_one_that_may_still_speak(process):
    assert not local_processes.is_frozen(process.pid)
    stop(process)
    assert local_processes.is_frozen(process.pid)
    go_on(process)
    assert not local_processes.is_frozen(process.pid)
    process.kill()
    process.wait()
    assert not local_processes.is_frozen(process.pid)


def test_seconds_count_from_the_first_look_that_saw_it_stopped(process, seen):
    assert seen() == ({}, {})
    stop(process)
    assert seen() == ({1: 0.0}, {})
    time.sleep(0.05)
    frozen, _ = seen()
    assert frozen[1] >= 0.05
    go_on(process)
    assert seen() == ({}, {})


@pytest.mark.parametrize("reaped", [True, False])
def test_seconds_count_from_the_first_look_that_missed_it(process, seen, reaped):
    assert seen() == ({}, {})
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    assert seen() == ({}, {1: 0.0})
    time.sleep(0.05)
    _, gone = seen()
    assert gone[1] >= 0.05


def test_who_runs_in_between_is_not_frozen(process, seen):
    """As under cpulimit, which may have stopped it whenever somebody looks."""
    stop(process)
    seen()
    before = local_processes._state(process.pid)
    go_on(process)
    until = time.monotonic() + 30
    # on a busy machine it takes a while until it has run for a tick, in which its time is counted
    while local_processes._state(process.pid)[1:] == before[1:] and time.monotonic() < until:
        time.sleep(0.01)
    stop(process)
    assert seen() == ({1: 0.0}, {})


def test_who_was_stopped_too_starts_to_count_anew(process, seen, monkeypatch):
    """Ctrl-Z stops a whole job; who goes on first must not take the others for frozen."""
    stop(process)
    seen()
    time.sleep(0.01)
    assert seen()[0][1] > 0
    monkeypatch.setattr(local_processes, "_GAP_SECONDS", 0.01)
    time.sleep(0.02)
    assert seen() == ({1: 0.0}, {})


def test_processes_of_another_host_are_not_looked_at(process, seen, monkeypatch):
    stop(process)
    monkeypatch.setattr(local_processes, "_system", lambda: "another host")
    assert seen() == ({}, {})


def test_who_was_never_seen_is_not_missed(process, seen):
    """``/proc`` may hide the processes of other users."""
    process.kill()
    process.wait()
    assert seen() == ({}, {})
    assert seen() == ({}, {})
