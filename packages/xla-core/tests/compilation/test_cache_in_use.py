"""The persistent cache as a training uses it: later processes compile nothing, whatever happened before."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time
from concurrent import futures

TRAIN = """
import sys, torch, torch_xla
import torch_xla.runtime as xr
from xla_core.support import counters
if "{how}" == "call":
    xr.initialize_cache({path!r}, readonly={readonly})

def train(width):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(8, 4).to("xla")
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    return loss.item()

losses = [train(width) for width in {widths}]
found = counters.all_counters()
print(found.get("UncachedCompile", 0), found.get("PersistentCacheHit", 0), *losses)
"""


def program(path, how="call", readonly=False, widths=(3, 5)):
    return TRAIN.format(path=str(path), how=how, readonly=readonly, widths=list(widths))


def outcome(output):
    compiled, loaded, *losses = output.split()
    return int(compiled), int(loaded), [float(x) for x in losses]


def test_a_second_process_compiles_nothing(run_python, tmp_path):
    path = tmp_path / "cache"
    compiled, loaded, losses = outcome(run_python(program(path)))
    assert compiled > 0 and loaded == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert outcome(run_python(program(path))) == (0, compiled, losses)


def test_the_environment_names_the_cache(run_python, tmp_path):
    path = str(tmp_path / "cache")
    by_environment = program(path, how="environment")
    compiled, _, losses = outcome(run_python(by_environment, XLA_PERSISTENT_CACHE_PATH=path))
    # the same programs, whoever chose the directory
    assert outcome(run_python(program(path))) == (0, compiled, losses)
    # without it nothing is looked up
    assert outcome(run_python(by_environment)) == (compiled, 0, losses)


def test_a_read_only_cache_is_read_and_not_written(run_python, tmp_path):
    path = tmp_path / "cache"
    compiled, _, losses = outcome(run_python(program(path, widths=[3])))
    files = set(path.iterdir())
    first, second = outcome(run_python(program(path, readonly=True)))[:2]
    assert second == compiled and first > 0
    assert set(path.iterdir()) == files
    by_environment = program(path, how="environment", widths=[3])
    found = run_python(
        by_environment, XLA_PERSISTENT_CACHE_PATH=str(path), XLA_PERSISTENT_CACHE_READ_ONLY="1"
    )
    assert outcome(found) == (0, compiled, losses)


def start(tmp_path, code):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


def test_two_processes_fill_one_directory_at_once(run_python, program_servers, tmp_path):
    path = tmp_path / "cache"
    code = textwrap.dedent(program(path))
    options = {"cwd": str(tmp_path), "environment": dict(os.environ), "timeout": 240}
    with futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(next(program_servers).run, code, **options) for _ in range(2)]
    done = [one.result() for one in running]
    assert [one.returncode for one in done] == [0, 0], done
    (compiled, loaded, losses), (compiled2, loaded2, losses2) = (outcome(d.stdout) for d in done)
    assert losses == losses2
    assert compiled + loaded == compiled2 + loaded2
    assert outcome(run_python(program(path))) == (0, compiled + loaded, losses)


def files_in(path):
    return len(list(path.iterdir())) if path.exists() else 0


def test_killing_a_training_at_any_moment_leaves_a_usable_cache(run_python, tmp_path):
    """Killed while files appear; the next process may compile what is missing, and all later find it."""
    path = tmp_path / "cache"
    for _ in range(2):
        process = start(tmp_path, program(path, widths=range(2, 30)))
        wanted = files_in(path) + 1
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if files_in(path) >= wanted:
                break
            time.sleep(0.002)
        time.sleep(random.random() * 0.3)  # truly random: another moment in every run
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        assert files_in(path) >= wanted
    compiled, loaded, losses = outcome(run_python(program(path, widths=range(2, 6))))
    assert loaded >= 1  # what was complete is found
    again = outcome(run_python(program(path, widths=range(2, 6))))
    assert again == (0, compiled + loaded, losses)
    # and none of it is another program than a compiler gives
    assert outcome(run_python(program(tmp_path / "new", widths=range(2, 6))))[2] == losses
