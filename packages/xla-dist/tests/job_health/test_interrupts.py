"""Ctrl-C reaches all processes of a job at once: each has time to save, and a hang says where it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dist_jobs import clean_environment

SCRIPT = """
import pathlib, signal, sys, time
import torch, torch_xla
import torch_xla.core.xla_model as xm

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores


def train(index):
    w = torch.ones(4, device="xla")
    w = w + xm.all_reduce("sum", w)
    w.cpu()
    pathlib.Path(f"ready {index}").touch()
    try:
        if "hang" in sys.argv and index == 0:
            xm.rendezvous("never reached by all")
        time.sleep(100)
    except KeyboardInterrupt:
        if "hang" not in sys.argv:
            time.sleep(2.0 * index)
            pathlib.Path(f"saved {index}").touch()
        raise
    finally:
        print(f"the end of {index}")


if __name__ == "__main__":
    torch_xla.launch(train)
"""
LIMIT = 20.0
"""A process has 5 s from another one's end on; torchrun takes some more for its own."""
LAUNCHERS = {
    "launch": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
}


@pytest.fixture
def interrupted(tmp_path):
    """Run the script, and interrupt it once it is ready: status, output, and seconds to the end."""
    started = []

    def run(launcher, *arguments):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT)
        process = subprocess.Popen(
            [*LAUNCHERS[launcher], str(path), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
            env=clean_environment(
                2 if launcher == "launch" else 1, XLA_FLIGHT_DIR=str(tmp_path / "flight")
            ),
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        until = time.monotonic() + 100
        while not all((tmp_path / f"ready {index}").exists() for index in range(2)):
            assert time.monotonic() < until and process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        time.sleep(0.7)  # so that each has shown what it does
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        text = process.communicate(timeout=60)[0]
        return process.returncode, text, time.monotonic() - began

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_process_may_keep_what_it_has(interrupted, tmp_path, launcher):
    """They were killed at once, and one that was slower than another ended with that one's traceback."""
    status, text, seconds = interrupted(launcher)
    assert status != 0
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved 0", "saved 1"], text
    for index in range(2):
        assert f"the end of {index}" in text  # what it had printed is not lost
    assert "coordinator" not in text
    assert "failed" not in text.replace("0 failed", "")
    assert seconds < LIMIT


def test_a_hang_that_is_interrupted_says_where_it_was(interrupted):
    status, text, seconds = interrupted("launch", "hang")
    assert status == -signal.SIGINT
    (path,) = re.findall(r"where the processes were when they were interrupted: (\S+)", text)
    page = Path(path).read_text()
    assert page.splitlines()[1].strip() == "interrupted (KeyboardInterrupt)"
    lines = SCRIPT.splitlines()
    sleeps = 1 + next(i for i, line in enumerate(lines) if "time.sleep(100)" in line)
    assert re.search(rf"ordinal 1 was interrupted at \S+script.py:{sleeps} in train: ", page), page
    assert seconds < LIMIT
