"""The names of ``torch_xla._internal.pjrt`` that test suites and libraries call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from xla_core.api import xla_model
from xla_core.execution import ordinals, runtime
from xla_core.multiprocess import job_setup
from xla_dist.processes import launching
from xla_dist.processes.launching import run_multiprocess as run_multiprocess
from xla_dist.processes.thread_replicas import run_threads

MSG_ALONE: Final = (
    "initialize_multiprocess({rank}, {count}): the environment names no job for these {count} processes "
    "to meet in. Set XLA_COORDINATOR_ADDRESS, XLA_PROCESS_COUNT and XLA_PROCESS_INDEX, or start them with "
    "torchrun or torch_xla.launch"
)


def initialize_multiprocess(local_rank: int, local_world_size: int) -> None:
    """Make this process, which something else started, one of ``local_world_size`` of this host.

    Gives it its part of the host's devices, and meets the others: the job's coordinator, or on a TPU the
    host's other processes, are in the environment. Raises RuntimeError when this process has used its
    devices already, or if it is alone and should not be.
    """
    if runtime.started():
        raise RuntimeError(launching.MSG_STARTED)
    own = launching.local_environments(os.environ)
    if len(own) == local_world_size:
        os.environ.update(own[local_rank])
    os.environ.setdefault(job_setup.LOCAL_INDEX_VARIABLE, str(local_rank))
    os.environ.setdefault(job_setup.LOCAL_COUNT_VARIABLE, str(local_world_size))
    runtime.client()
    if ordinals.replica_of()[1] < local_world_size:
        raise RuntimeError(MSG_ALONE.format(rank=local_rank, count=local_world_size))


def spawn(
    fn: Callable[..., Any],
    nprocs: int | None = None,
    start_method: str = "spawn",
    args: Sequence[Any] = (),
) -> None:
    """``xmp.spawn`` with the arguments in another order; waits for the processes."""
    launching.spawn(fn, args, nprocs, start_method=start_method)


def spawn_threads(fn: Callable[..., Any], args: Sequence[Any] = ()) -> dict[int, Any]:
    """Run ``fn(ordinal, *args)`` in one thread per device of this process; the results by ordinal."""
    return dict(enumerate(run_threads(xla_model.devices(), lambda ordinal: fn(ordinal, *args))))
