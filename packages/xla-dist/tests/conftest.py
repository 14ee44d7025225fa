"""What the tests of xla-dist share: jobs of CPU processes that start in a fraction of a second.

Importing torch and jax takes seconds of processor time in every process. The processes are forked
from a server that has imported them, which is ``multiprocessing``'s own start method ``forkserver``;
the launcher is the test's process. What has to run as a program of its own is given to ``run_script``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from multiprocessing import forkserver
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "jobs"
sys.path.insert(0, str(JOBS))  # the job processes import dist_jobs and its like by name

import dist_jobs  # noqa: E402 - found there
from dist_jobs import clean_environment  # noqa: E402 - likewise

COORDINATOR = "coordinator_process"
_PRELOADED = [
    "torch", "torch_xla.core.xla_model", "xla_dist.collectives.process_group",
    "xla_dist.processes.launching", "xla_dist.collectives.autograd_functions",
    "xla_dist.data_parallel.thread_data_parallel", "xla_dist.extension",
    "xla_core.extension_api.programs", "xla_pjrt_cpu", "dist_jobs",
    "dist_topology", "dist_loader", "dist_torch", "dist_meshes", "dist_collectives", "dist_gradients",
    "dist_vitals", "dist_fsdp", "dist_zero", "dist_restarts", "sklearn.datasets",
    "torch._dynamo.backends.torchxla", "jaxlib.mlir.dialects.mhlo",
    "xla_core.extension_api.shardings", "xla_spmd.extension", "dist_preloaded",
]  # fmt: skip


@pytest.fixture(scope="session")
def fork_server():
    """The server that the job processes are forked from."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = clean_environment(1)["PYTHONPATH"]  # the server's own imports
    multiprocessing.set_forkserver_preload(_PRELOADED)


class Job:
    """A launched job: ``results()``, or ``error`` and ``seconds`` to the exit."""

    def __init__(self, launched):
        self.launched = launched
        self.started = time.monotonic()
        self.seconds = 0.0

    def join(self):
        """Wait for the end; everyone's result, in ordinal order."""
        try:
            assert self.launched.join(timeout=150), "the job hangs"
            return [self.launched.results()[i] for i in sorted(self.launched.results())]
        finally:
            self.seconds = time.monotonic() - self.started
            for process in self.launched.processes:
                assert not process.is_alive()

    def error(self):
        """What launching raises."""
        with pytest.raises(Exception) as caught:
            self.join()
        return caught.value


@pytest.fixture
def launch(fork_server, monkeypatch):
    """Start ``fn(ordinal, *args)`` in so many processes; further keywords are environment variables."""
    from torch_xla.distributed import xla_multiprocessing as xmp
    from xla_core.extension_api import runtime

    if runtime.started():
        pytest.skip(
            "this process runs other packages' tests, on devices; run this folder by itself"
        )
    running = weakref.WeakSet()  # what has been joined and forgotten holds no descriptors

    def start(processes, fn, *args, **environment):
        wanted = clean_environment(processes, **environment)
        for name in set(os.environ) - set(wanted) - {"PYTEST_CURRENT_TEST"}:
            monkeypatch.delenv(name)
        for name, value in wanted.items():
            monkeypatch.setenv(name, value)
        launched = xmp.spawn(fn, args, join=False, start_method="forkserver")
        running.add(launched)
        return Job(launched)

    yield start
    for launched in running:
        for process in launched.processes:
            if process.is_alive():
                process.kill()


class Program:
    """A process that was started by itself: its end, what it wrote, and after how many seconds."""

    def __init__(self, process, output):
        self.process = process
        self.output = output
        self.started = time.monotonic()

    def join(self, timeout=100):
        """Exit status, output and seconds until the end."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"it hangs: {self.output.read_text()}"
        return self.process.exitcode, self.output.read_text(), time.monotonic() - self.started


@pytest.fixture
def start_program(fork_server, tmp_path):
    """Start ``fn(process index, *args)`` in a process that no launcher of ours knows."""
    running = []

    def start(environment, fn, *args):
        output = tmp_path / f"output {len(running)}"
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_address  # Python 3.11 to 3.13
        process = multiprocessing.get_context("forkserver").Process(
            target=dist_jobs.as_program, args=(environment, str(output), server, fn, args)
        )
        process.start()
        running.append(process)
        return Program(process, output)

    yield start
    for process in running:
        process.kill()
        process.join()


def coordinators(addresses):
    """The numbers of the processes that serve a job at one of ``addresses``."""
    serving = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            arguments = path.read_text().split("\0")
            if any(a.endswith(COORDINATOR) for a in arguments) and set(addresses) & set(arguments):
                serving.append(int(path.parent.name))
    return serving


@pytest.fixture
def start_hosts(start_program):
    """Start ``fn`` in the processes ``present`` of ``count``, as a user does host by host."""
    addresses = []

    def start(count, present, fn, *args, **extra):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{probe.getsockname()[1]}")
        job = {"XLA_COORDINATOR_ADDRESS": addresses[-1], "XLA_PROCESS_COUNT": str(count)}
        return [
            start_program(
                clean_environment(1, **job, XLA_PROCESS_INDEX=str(index), **extra), fn, *args
            )
            for index in present
        ]

    yield start
    for pid in coordinators(addresses):  # one that a test has stopped does not end by itself
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run_script(tmp_path):
    """Run a script as its user would; the finished process, of which no child is left."""

    def run(script, processes, *arguments, command=(sys.executable,), timeout=150, **environment):
        path = tmp_path / "script.py"
        path.write_text(script)
        process = subprocess.Popen(
            [*command, str(path), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=clean_environment(processes, **environment), start_new_session=True,
        )  # fmt: skip
        try:
            out, error = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    return run
