"""Ordinals and counts of replicas, processes, hosts and devices.

A replica is a device that trains on its own part of the batch together with the other replicas; its ordinal
is its position among them. A single process is replica 0 of 1. With one thread per device
(``DataParallel``, ``debug_single_process``), the current device of the calling thread is the replica.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import torch

from xla_core.contract.job import Job
from xla_core.execution import runtime, spmd_mode
from xla_core.multiprocess import job_setup
from xla_core.plugins.discovery import job_of

MSG_NO_REPLICA: Final = (
    "{device} is not one of this job's {count} replicas: each process is one, on its first device. Use "
    "torch_xla.device(0), or start one process per device"
)


def replica_of(device: torch.device | str | None = None) -> tuple[int, int]:
    """The ordinal of ``device`` (default: the thread's current one), and the number of replicas.

    Raises RuntimeError for a device that is not one of the job's replicas.
    """
    trace = runtime.trace_of(device)
    replicas, mine = trace.backend.replicas, trace.backend.placement.devices[0]
    if not replicas:
        return 0, 1
    if mine not in replicas:
        raise RuntimeError(MSG_NO_REPLICA.format(device=trace.device, count=len(replicas)))
    return replicas.index(mine), len(replicas)


def _job() -> Job | None:
    """This process's job; before the client starts, the one that the environment describes."""
    if met := job_setup.connection():
        return met.job
    options = os.environ
    if runtime.started() and not job_setup.describes_a_job(options):
        return None  # the plugin was asked when the client started; finding it takes milliseconds
    return job_of(runtime.device_type(), options)


def world_size() -> int:
    """The number of replicas that train together; 1 if this process is alone."""
    return replica_of()[1]


def global_ordinal() -> int:
    """This replica's number among all, from 0 to ``world_size() - 1``."""
    return replica_of()[0]


def local_ordinal() -> int:
    """This replica's number on its host."""
    return global_ordinal() - host_index() * _replicas_per_host()


def _replicas_per_host() -> int:
    return world_size() // host_count()


def process_index() -> int:
    """This process's number in the job, as the running client knows it."""
    return runtime.client().local_devices()[0].process_index


def process_count() -> int:
    """The number of processes in the job, as the running client knows it."""
    return len({d.process_index for d in runtime.client().devices()})


def local_process_count() -> int:
    """The number of the job's processes on this host."""
    job = _job()
    return job.local_count if job else 1


def host_index() -> int:
    """This host's number in the job; all hosts run the same number of processes."""
    job = _job()
    return job.host_index if job else 0


def host_count() -> int:
    """The number of hosts in the job."""
    job = _job()
    return max(job.count // job.local_count, 1) if job else 1


def global_device_count() -> int:
    """The number of devices of all processes; 1 in SPMD mode, which shows all of them as one."""
    return 1 if spmd_mode.is_spmd() else global_runtime_device_count()


def global_runtime_device_count() -> int:
    """The number of devices of all processes, as the runtime counts them."""
    return len(runtime.client().devices())


def addressable_runtime_device_count() -> int:
    """The number of devices this process addresses, as the runtime counts them."""
    return len(runtime.client().local_devices())


def addressable_device_count() -> int:
    """The number of devices this process addresses."""
    return len(runtime.traces())


def local_device_count() -> int:
    """The number of devices on this host; all processes address the same number of devices."""
    return local_process_count() * addressable_device_count()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this replica is the first one of its host or, with ``local=False`` (default: True), of the job.

    In SPMD mode, which has no replicas, this applies to processes.
    """
    if spmd_mode.is_spmd():
        job = _job()
        return job is None or (job.local_index if local else job.index) == 0
    return (local_ordinal() if local else global_ordinal()) == 0


def master_ip() -> str:
    """The IP address of the host on which the job's coordinator runs; loopback if this process is alone."""
    job = _job()
    host = job.address.rpartition(":")[0].strip("[]") if job and job.address else ""
    return socket.gethostbyname(host) if host else "127.0.0.1"


def device_attributes(index: int | None = None) -> dict[str, object]:
    """Name and attributes, as reported by the runtime, of addressable device ``index`` (default: the current)."""
    device = torch.device("xla", index) if index is not None else None
    description = runtime.client().local_devices()[runtime.trace_of(device).device.index]
    return {"name": f"{runtime.device_type()}:{description.id}", **description.attributes}


def global_device_attributes() -> list[dict[str, object]]:
    """Name and attributes of every device of the job, in the order of their ids."""
    kind = runtime.device_type()
    return [{"name": f"{kind}:{d.id}", **d.attributes} for d in runtime.client().devices()]
