"""What the processes of the tests' jobs run."""

from __future__ import annotations

import atexit
import importlib
import io
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from xla_dist.processes import launching

# What would change the meaning of a test if it came from the developer's own environment.
_CLEARED = (
    "XLA_", "CPU_NUM_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PJRT_", "RANK", "WORLD_SIZE",
    "MASTER_", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ALLREDUCE_",
)  # fmt: skip


def refused(kind, words, function, *arguments, **named):
    """Assert that a call raises an error of ``kind`` whose text has ``words``."""
    try:
        function(*arguments, **named)
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"{function} was not refused: {words}")


def clean_environment(processes, **extra):
    """The environment without settings of this project, with ``processes`` CPU devices.

    Each process compiles what it runs itself, and what the tests look at does not depend on how well: code that is
    compiled soon takes a third of the processor time.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_CLEARED)}
    defaults = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(processes),
        "OMP_NUM_THREADS": "1",
        "XLA_COMPILE_EFFORT": "fast",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    return {**inherited, **defaults, **extra}


def nothing(index):
    return (
        xr.global_ordinal(),
        xr.world_size(),
        xm.all_reduce("sum", torch.ones(1).to("xla")).item(),
    )


def reduced(*shape, kind="sum"):
    """One collective, run to its end."""
    return xm.all_reduce(kind, torch.ones(shape).to("xla")).cpu().sum().item()


# --- failures -----------------------------------------------------------------------------------


def raises(index, where):
    reduced(4)
    if index == 1:
        raise ValueError("the second process gives up")
    waits(index, where)


def raises_in_a_loop(index, path):
    """Fails while the workers of a loader run, of which it writes down the ids."""
    batches = torch.utils.data.DataLoader(range(10_000), num_workers=2)
    for _ in pl.MpDeviceLoader(batches, "xla"):
        workers = [str(child.pid) for child in multiprocessing.active_children()]
        Path(f"{path} {index}").write_text(" ".join(workers))
        xm.rendezvous("both have workers")
        if index == 1:
            raise ValueError("in the middle of the loop")


def is_killed(index, where):
    reduced(4)
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    waits(index, where)


def waits(index, where):
    """Comes where the others come never again."""
    if where == "rendezvous":
        xm.rendezvous("never reached by all")
    elif where == "known program":
        reduced(4)
    elif where == "new program":
        reduced(5)
    elif where == "python":
        time.sleep(120)


def misses(index, where):
    """The last process finishes early."""
    reduced(4)
    if index < xr.world_size() - 1:
        waits(index, where)


def differs(index, how):
    reduced(4), reduced(5)
    if how == "new program":
        reduced(6 + index)
    elif how == "new reduction":
        reduced(3, kind="max" if index else "sum")
    elif how == "known programs":
        reduced(4 + index)
    elif how == "known branch":
        for kind in (0, 1, 0, 0, 1):  # each branch has been taken after each
            reduced(4 + kind)
        reduced(4 + index)
    elif how == "crossed":
        xm.rendezvous("only here") if index else reduced(4)
    elif how == "crossed new":
        xm.rendezvous("only here") if index else reduced(6)
    elif how == "tags":
        xm.rendezvous(f"place {index}")
    elif how == "group":
        xm.all_reduce("sum", torch.ones(2).to("xla"), groups=[[0], [1]] if index else None).cpu()


def logged():
    """What xla-dist logs from now on."""
    log = io.StringIO()
    logging.getLogger("xla_dist").addHandler(logging.StreamHandler(log))
    return log


def is_slow(index, where, seconds):
    reduced(4)
    log = logged()
    if index == 1:
        time.sleep(seconds)
    waits(index, where)
    return log.getvalue()


def hangs(index, where):
    reduced(4)
    if index == 1:
        time.sleep(120)
    waits(index, where)


def as_program(environment, output, server, fn, args):
    """Runs ``fn(process index, *args)`` as a program that a user started by himself would.

    If it is a launcher, its processes are forked from ``server``, the address of the tests' fork server: from
    one of its own, each of them would import torch and jax.
    """
    own = multiprocessing.forkserver._forkserver  # Python 3.11 to 3.13
    own._forkserver_address, own.ensure_running = server, lambda: None
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 0
    try:
        fn(int(environment.get("XLA_PROCESS_INDEX", "0")), *args)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    except SystemExit as end:
        status = end.code
    atexit._run_exitfuncs()  # multiprocessing leaves them out
    sys.stdout.flush()
    os._exit(status)


def launches(index, pids, fn, *args):
    """A launcher in a process of its own; writes down the processes of its job."""
    launched = xmp.spawn(fn, args, join=False, start_method="fork")
    Path(pids).write_text(" ".join(map(str, launched.pids())))
    launched.join()


def forks_again(index, count):
    """A launcher that forks jobs one after the other; none leaves it a thread that a fork would cut off."""
    threads = Path("/proc/self/task")
    for _ in range(2):
        before = len(list(threads.iterdir()))
        launched = xmp.spawn(nothing, start_method="fork", join=False)
        assert len(list(threads.iterdir())) == before
        launched.join()
        assert launched.results() == {i: (i, count, float(count)) for i in range(count)}
    assert not multiprocessing.active_children()


def kills_its_coordinator(index, where):
    reduced(4)
    if index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    waits(index, where)


def runs_script(_index, path):
    """Runs a script whose processes are forked where it does not say how they start."""
    for function in (launching.spawn, launching.launch):
        function.__defaults__ = tuple("fork" if d == "spawn" else d for d in function.__defaults__)
    os.chdir(Path(path).parent)
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def trains_with_accelerate(index, folder):
    """dist_accelerate.py, whose imports take seconds that no other test should spend."""
    importlib.import_module("dist_accelerate").launches(index, folder)


def makes(index, kind):
    """A result of a kind that a launcher gets, or that nobody can pickle."""
    import torch

    kinds = {"tensor": lambda: torch.full((3, 4), float(index)), "function": lambda: lambda: index}
    return kinds[kind]()
