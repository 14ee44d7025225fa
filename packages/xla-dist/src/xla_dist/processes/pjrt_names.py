"""The names of ``torch_xla._internal.pjrt`` that test suites and libraries call."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from xla_core.extension_api import jobs, runtime
from xla_dist.processes import launching
from xla_dist.processes.launching import run_multiprocess as run_multiprocess
from xla_dist.processes.thread_replicas import run_threads

R = TypeVar("R")

MSG_TWICE: Final = (
    "the replicas {ordinals} gave several results each: ordinals are not unique in this job"
)
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
    """``xmp.spawn`` with the arguments in another order; waits for the processes."""
    launching.spawn(fn, args, nprocs, start_method=start_method)


def spawn_threads(fn: Callable[..., object], args: Sequence[object] = ()) -> dict[int, object]:
    """Run ``fn(ordinal, *args)`` in one thread per device of this process; the results by ordinal."""
    return dict(enumerate(run_threads(runtime.devices(), lambda ordinal: fn(ordinal, *args))))


def initialize_singleprocess() -> None:
    """Make this process a job of its own: it drives all devices that it sees. Does nothing once they run."""
    _initialize_single_process(0, 1)
    runtime.client()


def _initialize_single_process(local_rank: int, local_world_size: int) -> None:
    """Write down that this process is ``local_rank`` of ``local_world_size`` on this host, unless said."""
    os.environ.setdefault(jobs.LOCAL_INDEX_VARIABLE, str(local_rank))
    os.environ.setdefault(jobs.LOCAL_COUNT_VARIABLE, str(local_world_size))


def _merge_replica_results(replica_results: Sequence[tuple[int, R]]) -> dict[int, R]:
    """Results by ordinal. Raises ValueError when an ordinal has several."""
    merged = dict(replica_results)
    if len(merged) < len(replica_results):
        counted = Counter(ordinal for ordinal, _ in replica_results)
        twice = sorted(ordinal for ordinal, count in counted.items() if count > 1)
        raise ValueError(MSG_TWICE.format(ordinals=twice))
    return merged


def _run_thread_per_device(
    local_rank: int,
    local_world_size: int,
    fn: Callable[[], R],
    initializer_fn: Callable[[int, int], None],
) -> dict[int, R]:
    """Call ``initializer_fn(local_rank, local_world_size)``, then ``fn()`` in a thread per device.

    The threads are replicas; the results by ordinal.
    """
    initializer_fn(local_rank, local_world_size)
    return _merge_replica_results(
        run_threads(runtime.devices(), lambda _: (runtime.global_ordinal(), fn()))
    )


def _run_singleprocess(fn: Callable[..., R], *args: object, **kwargs: object) -> dict[int, R]:
    """``fn(*args, **kwargs)`` in a thread per device of this process; the results by ordinal."""
    call = functools.partial(fn, *args, **kwargs)
    return _run_thread_per_device(0, 1, call, _initialize_single_process)


class _SpawnFn:
    """``fn(ordinal, *args, **kwargs)`` as a function without arguments, which can be sent to a process."""

    def __init__(self, fn: Callable[..., object], *args: object, **kwargs: object) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __call__(self) -> None:
        self.fn(runtime.global_ordinal(), *self.args, **self.kwargs)
