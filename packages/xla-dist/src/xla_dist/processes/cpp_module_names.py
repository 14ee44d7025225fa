"""The names of torch_xla's C++ module ``_XLAC`` about how processes meet."""

from __future__ import annotations

from typing import Final

from xla_core.extension_api import jobs, runtime
from xla_core.extension_api.jobs import Job

MSG_OTHER_JOB: Final = (
    "this process is number {index} of {count} already, and _ensure_xla_coordinator_initialized says {rank} of "
    "{world}; start it with the numbers that it should have (torchrun, or XLA_PROCESS_INDEX and XLA_PROCESS_COUNT)"
)
MSG_LATE: Final = (
    "the device client of this process was started for it alone; call "
    "_ensure_xla_coordinator_initialized before the first xla tensor is made"
)


def _ensure_xla_coordinator_initialized(
    global_rank: int, world_size: int, master_addr: str, master_port: str = "8547"
) -> None:
    """Meet the other processes of the job, unless that has happened: process 0 runs the coordinator.

    A process that is alone waits for no other. Raises RuntimeError where this process belongs to another job, its
    client is already running without the others, or the coordinator cannot be reached.
    """
    met = jobs.connection()
    if met is not None:
        if (met.job.index, met.job.count) != (global_rank, world_size):
            arguments = {"rank": global_rank, "world": world_size}
            raise RuntimeError(
                MSG_OTHER_JOB.format(index=met.job.index, count=met.job.count, **arguments)
            )
        return
    if world_size == 1:
        return
    if runtime.started():
        raise RuntimeError(MSG_LATE)
    jobs.connect(Job(int(global_rank), int(world_size), f"{master_addr}:{master_port}"))
