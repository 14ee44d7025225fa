"""The function of torch_xla's C++ module ``_XLAC`` by which processes join a job."""

from __future__ import annotations

from typing import Final

from xla_core.extension_api import jobs, runtime
from xla_core.extension_api.jobs import Job

MSG_OTHER_JOB: Final = (
    "this process is already number {index} of {count} of a job, but _ensure_xla_coordinator_initialized got "
    "{rank} of {world}; start the process with the right numbers (torchrun, or XLA_PROCESS_INDEX and "
    "XLA_PROCESS_COUNT)"
)
MSG_LATE: Final = (
    "the device client of this process has already started without a job; call "
    "_ensure_xla_coordinator_initialized before you create the first xla tensor"
)


def _ensure_xla_coordinator_initialized(
    global_rank: int, world_size: int, master_addr: str, master_port: str = "8547"
) -> None:
    """Join the job of ``world_size`` processes as number ``global_rank``; does nothing if that has happened.

    Process 0 runs the job's coordinator at ``master_addr:master_port`` (default port: 8547). With a ``world_size``
    of 1 there is no job to join. Raises RuntimeError if this process belongs to another job, if its device client
    has already started without a job, or if the coordinator cannot be reached.
    """
    connection = jobs.connection()
    if connection is not None:
        index, count = connection.job.index, connection.job.count
        if (index, count) != (global_rank, world_size):
            arguments = {"rank": global_rank, "world": world_size}
            raise RuntimeError(MSG_OTHER_JOB.format(index=index, count=count, **arguments))
        return
    if world_size == 1:
        return
    if runtime.started():
        raise RuntimeError(MSG_LATE)
    jobs.connect(Job(int(global_rank), int(world_size), f"{master_addr}:{master_port}"))
