"""Stopped processes are told from those that stand still for a moment, or run a little in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from xla_core import distributed
from xla_dist import frozen


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
def looks(process, monkeypatch):
    """Looks of ordinal 0 at ordinal 1, which is ``process``."""
    names = {"0": os.getpid(), "1": process.pid}
    told = {name: f"{frozen._system()} {pid}".encode() for name, pid in names.items()}
    monkeypatch.setattr(distributed, "published", lambda folder: told)
    return frozen.Frozen(2)


def test_a_stopped_process_is_told_from_one_that_may_still_speak(process):
    assert not frozen.is_frozen(process.pid)
    stop(process)
    assert frozen.is_frozen(process.pid)
    go_on(process)
    assert not frozen.is_frozen(process.pid)
    process.kill()
    process.wait()
    assert not frozen.is_frozen(process.pid)


def test_seconds_count_from_the_first_look_that_saw_it_stopped(process, looks):
    assert looks.look(()) == {}
    stop(process)
    assert looks.look(()) == {1: 0.0}
    time.sleep(0.05)
    assert looks.look(())[1] >= 0.05
    assert looks.look({"1"}) == {}  # it has finished well
    assert looks.look(()) == {1: 0.0}
    go_on(process)
    assert looks.look(()) == {}


def test_who_runs_in_between_is_not_frozen(process, looks):
    """As under cpulimit, which may have stopped it whenever somebody looks."""
    stop(process)
    looks.look(())
    go_on(process)
    time.sleep(0.1)  # ten of the ticks that its processor time is counted in
    stop(process)
    assert looks.look(()) == {1: 0.0}


def test_who_was_stopped_too_starts_to_count_anew(process, looks, monkeypatch):
    """Ctrl-Z stops a whole job; who goes on first must not take the others for frozen."""
    stop(process)
    looks.look(())
    time.sleep(0.01)
    assert looks.look(())[1] > 0
    monkeypatch.setattr(frozen, "_GAP_SECONDS", 0.01)
    time.sleep(0.02)
    assert looks.look(()) == {1: 0.0}


def test_processes_of_another_host_are_not_looked_at(process, looks, monkeypatch):
    stop(process)
    monkeypatch.setattr(frozen, "_system", lambda: "another host")
    assert looks.look(()) == {}
