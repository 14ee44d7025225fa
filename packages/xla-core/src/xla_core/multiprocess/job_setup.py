"""A job of several processes: what the environment says of it, and jaxlib's distributed runtime.

Replicas (xla-dist) and meshes over several hosts (xla-spmd) start the same way: the environment
names a coordinator, the number of processes and this process's number; the processes meet there
through jaxlib's runtime, whose key-value store also carries what they tell each other outside of
programs. Nothing here is used by a process that is alone.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore

from xla_core.contract.device_protocol import Topology
from xla_core.contract.job import Job, parse_number
from xla_core.jax_bridge import coordinator_process as coordinator
from xla_core.jax_bridge import jaxlib_runtime, pjrt_c_api
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.multiprocess.startup_watchdog import Siblings, vigil
from xla_core.support import flags

COORDINATOR_VARIABLE: Final = flags.COORDINATOR_ADDRESS.name
COUNT_VARIABLE: Final = flags.PROCESS_COUNT.name
INDEX_VARIABLE: Final = flags.PROCESS_INDEX.name
LOCAL_INDEX_VARIABLE: Final = flags.LOCAL_PROCESS_RANK.name
LOCAL_COUNT_VARIABLE: Final = flags.LOCAL_PROCESS_COUNT.name
SERVED_VARIABLE: Final = flags.COORDINATOR_IS_LAUNCHER.name
"""Set by a launcher that runs the coordinator itself; otherwise process 0 does."""

_OWN: Final = (COORDINATOR_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE)
_TORCHRUN: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


MSG_INCOMPLETE: Final = (
    "{found} is set and {missing} is not; a job of several processes needs all of "
    "XLA_COORDINATOR_ADDRESS (host:port), XLA_PROCESS_COUNT and XLA_PROCESS_INDEX"
)
MSG_ADDRESS: Final = "{name}={text!r} in the environment: expected host:port"
MSG_NO_COORDINATOR: Final = (
    "process {index} of {count} could not reach the coordinator at {address} within {seconds} s: "
    "{error}. {who} runs it; look whether that one started, and whether the address is right"
)


@dataclasses.dataclass(slots=True)
class Connection:
    """A process that has met the others of its ``job``.

    ``client`` is jaxlib's; process 0 may run the ``service``.
    """

    job: Job
    client: JaxObject
    service: coordinator.CoordinatorProcess | None


class _State:
    connection: Connection | None = None


_lock = threading.RLock()


def job_from_environment(options: Mapping[str, str]) -> Job | None:
    """The job that this project's own variables describe, or else torchrun's; None if there are none of them.

    A job of one process is None as well. Raises ValueError for an incomplete or malformed description, naming the
    variable.
    """
    names = [name for name in _OWN if options.get(name)]
    if names:
        missing = [name for name in _OWN if not options.get(name)]
        if missing:
            raise ValueError(MSG_INCOMPLETE.format(found=names[0], missing=missing[0]))
        return _own_job(options)
    return _torchrun_job(options) if all(options.get(name) for name in _TORCHRUN) else None


def describes_a_job(options: Mapping[str, str]) -> bool:
    """Whether there are variables that ``job_from_environment`` reads, be it a job of one process."""
    return any(options.get(n) for n in _OWN) or all(options.get(n) for n in _TORCHRUN)


def _own_job(options: Mapping[str, str]) -> Job | None:
    address = options[COORDINATOR_VARIABLE]
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise ValueError(MSG_ADDRESS.format(name=COORDINATOR_VARIABLE, text=address))
    count = parse_number(options, COUNT_VARIABLE, 1, 1)
    local_count = parse_number(options, LOCAL_COUNT_VARIABLE, 1, 1, count + 1)
    return _several(
        Job(
            index=parse_number(options, INDEX_VARIABLE, 0, 0, count),
            count=count,
            address=address,
            local_index=parse_number(options, LOCAL_INDEX_VARIABLE, 0, 0, local_count),
            local_count=local_count,
            served=options.get(SERVED_VARIABLE) == "1",
        )
    )


def _several(job: Job) -> Job | None:
    return job if job.count > 1 or job.served else None


def _torchrun_job(options: Mapping[str, str]) -> Job | None:
    count = parse_number(options, "WORLD_SIZE", 1, 1)
    local_count = parse_number(options, "LOCAL_WORLD_SIZE", 1, 1, count + 1)
    return _several(
        Job(
            index=parse_number(options, "RANK", 0, 0, count),
            count=count,
            address="",  # agreed through torchrun's store when connecting
            local_index=parse_number(options, "LOCAL_RANK", 0, 0, local_count),
            local_count=local_count,
        )
    )


# --- meeting ------------------------------------------------------------------------------------


def connection() -> Connection | None:
    """The connection to the other processes, or None while there is none."""
    return _State.connection


def connect(job: Job) -> Connection:
    """Meet the other processes of ``job``; returns once all have arrived. Later calls return the first's.

    Raises RuntimeError when the coordinator cannot be reached. A process that never arrives ends
    the others after ``XLA_DIST_START_TIMEOUT`` seconds, when the runtime aborts them; one that does
    not run on this host, and belongs here, after ``XLA_DIST_ABSENT_TIMEOUT``.
    """
    with _lock:
        if _State.connection is None:
            where, limit = job.address or "torchrun's store", flags.START_TIMEOUT.get()
            with vigil(job.index, job.count, where, limit, _siblings(job, os.environ)):
                _State.connection = _meet(job, limit)
            atexit.register(disconnect)
        return _State.connection


def serve(address: str, count: int) -> coordinator.CoordinatorHere:
    """Run the coordinator of ``count`` processes at ``address`` until ``shutdown()`` of the result.

    In this process, which is a launcher: nothing is to be said once that is killed.
    """
    return coordinator.CoordinatorHere(*_served(address, count))


def serve_apart(address: str, count: int) -> coordinator.CoordinatorProcess:
    """The same in a process of its own: this one stays without the threads of a coordinator."""
    return coordinator.CoordinatorProcess(*_served(address, count))


def _served(address: str, count: int) -> tuple[str, int, int, int]:
    """What a coordinator is started with."""
    return _bind_address(address), count, flags.FAILURE_TIMEOUT.get(), flags.START_TIMEOUT.get()


def _bind_address(address: str) -> str:
    """Where to listen: loopback stays loopback, so that a laptop's job is not seen from outside."""
    return address if _is_loopback(address) else f"[::]:{address.rpartition(':')[2]}"


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")


def _meet(job: Job, seconds: int) -> Connection:
    if not job.address:
        job = dataclasses.replace(job, address=_agreed_address(job))
    service = None
    if job.index == 0 and not job.served:
        service = coordinator.CoordinatorProcess(*_served(job.address, job.count))
    _await_coordinator(job, seconds)
    client = jaxlib_runtime.coordination_client(
        job.address, job.index, seconds, flags.FAILURE_TIMEOUT.get()
    )
    client.connect()
    return Connection(job, client, service)


def _siblings(job: Job, options: Mapping[str, str]) -> Siblings | None:
    """Those that belong on this host, if they were started with their numbers in the environment."""
    first = job.index - job.local_index
    local = range(first, first + job.local_count)
    if options.get(COORDINATOR_VARIABLE):
        expected = range(job.count) if _is_loopback(job.address) else local
        shared = {COORDINATOR_VARIABLE: options[COORDINATOR_VARIABLE]}
        return Siblings(expected, INDEX_VARIABLE, shared)
    if all(options.get(name) for name in _TORCHRUN):
        return Siblings(local, "RANK", {name: options[name] for name in _TORCHRUN[:2]})
    return None


def _await_coordinator(job: Job, seconds: int) -> None:
    """Wait until a process listens at the coordinator's address.

    Raises RuntimeError saying who should: the runtime itself would abort the process.
    """
    host, _, port = job.address.rpartition(":")
    pause = threading.Event()
    error: OSError | None = None
    for _ in range(max(seconds * 10, 1)):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError as failure:
            error = failure
        pause.wait(0.1)
    who = "the launcher" if job.served else "Process 0"
    raise RuntimeError(
        MSG_NO_COORDINATOR.format(
            index=job.index, count=job.count, address=job.address, seconds=seconds, error=error,
            who=who,
        )
    )  # fmt: skip


def _agreed_address(job: Job) -> str:
    """Under torchrun: a free port that process 0 chooses and gives to the others through the store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # No agent keeps a store there; the port itself is for torch.distributed.
        return f"{host}:{port + 1}"
    store = TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=flags.START_TIMEOUT.get())
    )  # fmt: skip
    key = f"xla/coordinator/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job.index == 0:
        store.set(key, f"{host}:{free_port()}")
    return str(store.get(key).decode())


def free_port() -> int:
    """A TCP port on which no process is listening now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def disconnect() -> None:
    """Leave the job: the others no longer count on this process. Does nothing when alone."""
    with _lock:
        left, _State.connection = _State.connection, None
    if left is None:
        return
    with contextlib.suppress(RuntimeError):  # the coordinator may be gone already
        left.client.shutdown()
    if left.service is not None:
        left.service.leave()


def topology(job: Job) -> Topology:
    """The topology of a job, after meeting the others.

    This is what a client starts with where no extension answers the hook ``xla_core_topology``.
    """
    met = connect(job)
    return Topology(
        process_index=met.job.index,
        process_count=met.job.count,
        coordinator_address=met.job.address,
        distributed_client=met.client,
    )


# --- the key-value store ------------------------------------------------------------------------


def publish(key: str, value: bytes) -> None:
    """Store ``value`` under ``key`` for all processes; a former value is replaced.

    Raises RuntimeError when not connected.
    """
    _client().key_value_set_bytes(key, value, True)


def published(folder: str) -> dict[str, bytes]:
    """What all processes have published under ``folder/``, by the rest of the key."""
    prefix = f"{folder}/"
    items: Sequence[tuple[str, bytes]] = _client().key_value_dir_get_bytes(prefix)
    return {key.removeprefix(prefix): bytes(value) for key, value in items}


def lookup(key: str) -> bytes | None:
    """What is published under ``key``, or None."""
    try:
        return bytes(_client().key_value_try_get_bytes(key))
    except RuntimeError as error:
        if pjrt_c_api.is_not_found(error):
            return None
        raise


def increment(key: str, by: int) -> int:
    """Add to the number under ``key``, which starts at 0; its new value."""
    return int(_client().key_value_increment(key, by))


def withdraw(key: str) -> None:
    """Remove ``key``, or all of a folder."""
    _client().key_value_delete(key)


def _client() -> JaxObject:
    met = _State.connection
    if met is None:
        raise RuntimeError("this process has not met other processes: it is alone, or has left")
    return met.client
