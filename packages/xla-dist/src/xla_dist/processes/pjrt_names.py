"""The names of ``torch_xla._internal.pjrt`` that test suites and libraries call."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from xla_core.extension_api import jobs, runtime
from xla_dist.processes import host_devices, launching
from xla_dist.processes.launching import run_multiprocess as run_multiprocess
from xla_dist.processes.thread_replicas import run_threads

R = TypeVar("R")

MSG_TWICE: Final = "ordinals must be unique in a job, but {ordinals} have several results each"
MSG_ALONE: Final = (
    "initialize_multiprocess({rank}, {count}): the environment names no job that these {count} processes "
    "can join. Set XLA_COORDINATOR_ADDRESS, XLA_PROCESS_COUNT and XLA_PROCESS_INDEX, or start the processes "
    "with torchrun or torch_xla.launch"
)


def initialize_multiprocess(local_rank: int, local_world_size: int) -> None:
    """Make this process number ``local_rank`` of the ``local_world_size`` processes of this host.

    For processes that something other than our launcher started. This process gets its part of the host's devices,
    and joins the job: environment variables name the coordinator, or on a TPU the host's other
    processes. Raises RuntimeError if this process has already used its devices, or if the environment
    names no job of this size.
    """
    if runtime.started():
        raise RuntimeError(launching.MSG_STARTED)
    environments = host_devices.environments(os.environ)
    if len(environments) == local_world_size:
        os.environ.update(environments[local_rank])
    os.environ.setdefault(jobs.LOCAL_INDEX_VARIABLE, str(local_rank))
    os.environ.setdefault(jobs.LOCAL_COUNT_VARIABLE, str(local_world_size))
    runtime.client()
    if runtime.replica_of()[1] < local_world_size:
        raise RuntimeError(MSG_ALONE.format(rank=local_rank, count=local_world_size))


def spawn(
    fn: Callable[..., object],
    nprocs: int | None = None,
    start_method: str = "spawn",
    args: Sequence[object] = (),
) -> None:
    """``xmp.spawn`` with its arguments in another order; always waits for the processes."""
    launching.spawn(fn, args, nprocs, start_method=start_method)


def spawn_threads(fn: Callable[..., object], args: Sequence[object] = ()) -> dict[int, object]:
    """Run ``fn(ordinal, *args)`` in one thread per device of this process; returns the results by ordinal."""
    return dict(enumerate(run_threads(runtime.devices(), lambda ordinal: fn(ordinal, *args))))


def initialize_singleprocess() -> None:
    """Start this process without a job, so that it drives all devices that it sees.

    Does nothing if the device client already runs.
    """
    _initialize_single_process(0, 1)
    runtime.client()


def _initialize_single_process(local_rank: int, local_world_size: int) -> None:
    """Set the variables of this process's local rank and local world size, unless they are already set."""
    os.environ.setdefault(jobs.LOCAL_INDEX_VARIABLE, str(local_rank))
    os.environ.setdefault(jobs.LOCAL_COUNT_VARIABLE, str(local_world_size))


def _merge_replica_results(replica_results: Sequence[tuple[int, R]]) -> dict[int, R]:
    """The results by ordinal. Raises ValueError if there are several for one ordinal."""
    merged = dict(replica_results)
    if len(merged) < len(replica_results):
        counts = Counter(ordinal for ordinal, _ in replica_results)
        repeated = sorted(ordinal for ordinal, count in counts.items() if count > 1)
        raise ValueError(MSG_TWICE.format(ordinals=repeated))
    return merged


def _run_thread_per_device(
    local_rank: int,
    local_world_size: int,
    fn: Callable[[], R],
    initializer_fn: Callable[[int, int], None],
) -> dict[int, R]:
    """Call ``initializer_fn(local_rank, local_world_size)``, then ``fn()`` in a thread per device.

    The threads are replicas. Returns the results by ordinal.
    """
    initializer_fn(local_rank, local_world_size)
    return _merge_replica_results(
        run_threads(runtime.devices(), lambda _: (runtime.global_ordinal(), fn()))
    )


def _run_singleprocess(fn: Callable[..., R], *args: object, **kwargs: object) -> dict[int, R]:
    """Call ``fn(*args, **kwargs)`` in one thread per device of this process; returns the results by ordinal."""
    call = functools.partial(fn, *args, **kwargs)
    return _run_thread_per_device(0, 1, call, _initialize_single_process)


class _SpawnFn:
    """``fn(ordinal, *args, **kwargs)`` as a function without arguments that can be pickled."""

    def __init__(self, fn: Callable[..., object], *args: object, **kwargs: object) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __call__(self) -> None:
        self.fn(runtime.global_ordinal(), *self.args, **self.kwargs)
