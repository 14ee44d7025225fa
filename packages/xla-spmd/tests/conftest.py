"""What the tests of xla-spmd share: eight CPU devices, shown as one."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

DEVICES = 8
HERE = Path(__file__).parent

# What would change the meaning of a test if it came from the developer's own environment.
_CLEARED = (
    "XLA_", "CPU_NUM_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PJRT_", "RANK", "WORLD_SIZE",
    "MASTER_", "LOCAL_RANK",
)  # fmt: skip
# What the tests look at does not depend on how well programs are compiled; those of training run as users' do.
_CHOSEN = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "XLA_COMPILE_EFFORT": "fast"}


def pytest_collection_modifyitems(items):
    """Show all devices of this process as one, if it runs nothing but the tests of this folder."""
    mine = [item for item in items if HERE in item.path.parents]
    if len(mine) == len(items):
        _enter_spmd_mode()
        return
    reason = "this process runs other packages' tests, on single devices; run this folder by itself"
    for item in mine:
        item.add_marker(pytest.mark.skip(reason=reason))


def _enter_spmd_mode():
    for name in [name for name in os.environ if name.startswith(_CLEARED)]:
        del os.environ[name]
    os.environ.update(_CHOSEN)
    torch.set_num_threads(1)
    import torch_xla.runtime as xr

    xr.use_spmd()


@pytest.fixture(autouse=True)
def new_step():
    """What an earlier test left pending is no part of this one's steps."""
    from xla_core.extension_api import runtime

    if runtime.started():
        gc.collect()
        for trace in runtime.traces():
            trace.flush(trace)


@pytest.fixture
def compile_count():
    """A function that says how many programs this process has compiled."""
    from xla_core.support import counters

    return lambda: counters.all_counters().get("UncachedCompile", 0)


@pytest.fixture
def mesh():
    """Four by two devices: ``data`` and ``model``."""
    import torch_xla.distributed.spmd as xs

    return xs.Mesh(np.arange(DEVICES), (4, 2), ("data", "model"))


@pytest.fixture
def run_python(tmp_path, program_servers):
    """Run a program in a process of its own, in ``tmp_path``; its output, or with ``fails`` its error.

    The process has torch and jax already.
    """

    def run(code, *, fails=False, timeout=240, **environment):
        server, wanted = next(program_servers), clean_environment(**environment)
        code = textwrap.dedent(code)
        result = server.run(code, cwd=str(tmp_path), environment=wanted, timeout=timeout)
        assert (result.returncode != 0) == fails, result.stdout + result.stderr
        assert result.returncode in (0, 1), result.stdout + result.stderr
        return result.stderr if fails else result.stdout

    return run


def clean_environment(**extra):
    """The environment without settings of this project, with eight CPU devices."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_CLEARED)}
    return {**inherited, **_CHOSEN, "OMP_NUM_THREADS": "1", **extra}


@pytest.fixture
def environment():
    """``clean_environment``."""
    return clean_environment


@pytest.fixture
def run_hosts(tmp_path):
    """Run a command in two processes with four devices each, as on two hosts; what each printed."""

    def run(*command):
        address = f"127.0.0.1:{free_port()}"
        running = [
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                env=clean_environment(
                    CPU_NUM_DEVICES="4",
                    XLA_COORDINATOR_ADDRESS=address,
                    XLA_PROCESS_COUNT="2",
                    XLA_PROCESS_INDEX=str(index),
                ),
            )
            for index in range(2)
        ]  # fmt: skip
        ended = [process.communicate(timeout=200) for process in running]
        for process, (output, error) in zip(running, ended, strict=True):
            assert process.returncode == 0, output + error
        return [output for output, _ in ended]

    return run


def free_port():
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port():
    """``free_port``."""
    return free_port()
