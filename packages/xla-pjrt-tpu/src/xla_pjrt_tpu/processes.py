"""The processes of a slice: their number, chips and addresses (``torch_xla._internal.tpu``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Final

import xla_pjrt_tpu.chips as chips
import xla_pjrt_tpu.environment as environment
import xla_pjrt_tpu.settings as settings
from xla_pjrt_tpu.hardware import GENERATIONS, generation, parse_accelerator_type

BASE_PORT: Final = 8476
"""The port of a host's first process; the others have the following ports. libtpu has the same default."""

MSG_BAD_BOUNDS: Final = "{name} is {text!r}; write three numbers such as 2,2,1"


def num_available_chips() -> int:
    """The number of TPU chips on this host's PCI bus. Does not use the network."""
    return chips.find_chips().count


def version() -> int:
    """The number of the TPU generation: 2, 3, 4, 5 (v5e and v5p), 6 or 7.

    Raises RuntimeError if this host has no TPU and its environment names none.
    """
    name = chips.version_name(os.environ, chips.find_chips())
    if name is None:
        name = generation(environment.get_tpu_type().rpartition("-")[0]).name
    return GENERATIONS[name].number


def num_logical_cores_per_chip() -> int:
    """The number of devices per chip: 2 for v2, v3 and v7x, 1 for others and without a TPU."""
    name = chips.version_name(os.environ, chips.find_chips())
    return GENERATIONS[name].devices if name is not None else 1


def num_available_devices() -> int:
    """The number of TPU devices of this host, or ``TPU_NUM_DEVICES`` if it is set. Does not use the network."""
    named = settings.NUM_DEVICES.text()
    if named:
        return int(named)
    chips = num_available_chips()
    return chips * num_logical_cores_per_chip() if chips else 0


def num_local_processes() -> int:
    """The number of processes that share this host's chips: one per visible chip."""
    visible = settings.VISIBLE_CHIPS.text()
    return len(visible.split(",")) if visible else num_available_chips()


def task_id() -> int | None:
    """The number of this process in the slice (``CLOUD_TPU_TASK_ID``); None if it is not set."""
    text = settings.TASK_ID.text()
    return int(text) if text else None


def worker_id() -> int:
    """The number of this host in its slice. Raises RuntimeError when it is unknown."""
    return environment.worker_id()


def get_worker_ips() -> list[str]:
    """The addresses of the slice's hosts. Raises RuntimeError when they are unknown."""
    return environment.worker_ips()


def get_tpu_env() -> dict[str, str]:
    """The description of the slice, under the names of ``tpu-env``. Raises RuntimeError if it is unknown."""
    return environment.get_tpu_env()


def get_tpu_type() -> str:
    """The accelerator type. Raises RuntimeError when it is unknown."""
    return environment.get_tpu_type()


def process_bounds_size(default: int = 1) -> int:
    """The number of processes in the slice by ``TPU_PROCESS_BOUNDS``; ``default`` (1) if that is not set."""
    text = settings.PROCESS_BOUNDS.text()
    return math.prod(bounds("TPU_PROCESS_BOUNDS", text)) if text else default


def num_expected_global_devices() -> int:
    """The number of devices of the whole slice. Raises RuntimeError if the slice is unknown."""
    env = environment.get_tpu_env()
    hosts, host_chips = slice_bounds(env)
    return math.prod(hosts) * math.prod(host_chips) * num_logical_cores_per_chip()


def slice_bounds(env: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of hosts along each axis of the slice, and of chips along each axis of a host.

    From the bounds in ``env``, or else from the accelerator type. Raises ValueError for malformed bounds or an
    unknown type.
    """
    hosts, host_chips = env.get(environment.PROCESS_BOUNDS), env.get(environment.CHIPS_PER_PROCESS)
    if hosts and host_chips:
        return (
            bounds(environment.PROCESS_BOUNDS, hosts),
            bounds(environment.CHIPS_PER_PROCESS, host_chips),
        )
    chip, shape = parse_accelerator_type(env[environment.ACCELERATOR_TYPE])
    whole = (*shape, 1, 1)[:3]
    per_host = tuple(min(a, b) for a, b in zip(whole, chip.chips_per_host, strict=True))
    return tuple(a // b for a, b in zip(whole, per_host, strict=True)), per_host


def configure_one_chip_topology() -> None:
    """Set the environment so that this process uses only the host's first chip; variables that are set stay."""
    os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_VISIBLE_CHIPS", "0")


def configure_topology(local_rank: int, local_world_size: int, base_port: int = BASE_PORT) -> None:
    """Set the environment of process ``local_rank`` of the ``local_world_size`` processes of this host.

    Each process gets one chip; a single process keeps the slice as the host sees it. Variables that are already set
    stay. ``base_port`` (default: 8476) is the port of the host's first process. Call this before the client
    starts. Raises RuntimeError if the slice is unknown, ValueError if there is not one process per chip.
    """
    for name, value in topology_variables(local_rank, local_world_size, base_port).items():
        os.environ.setdefault(name, value)


def topology_variables(
    local_rank: int, local_world_size: int, base_port: int = BASE_PORT
) -> dict[str, str]:
    """The variables that ``configure_topology`` sets."""
    if local_world_size == 1:
        return {}
    hosts, host_chips = slice_bounds(environment.get_tpu_env())
    if math.prod(host_chips) != local_world_size:
        raise ValueError(
            f"{local_world_size} processes on a host with {math.prod(host_chips)} chips "
            f"({_text(host_chips)}); start one per chip, or one alone"
        )
    host = environment.worker_id()
    addresses = [
        f"{ip}:{base_port + rank}"
        for ip in worker_addresses(math.prod(hosts))
        for rank in range(local_world_size)
    ]
    bounds = [a * b for a, b in zip(hosts, host_chips, strict=True)]
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": _text(bounds),
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "CLOUD_TPU_TASK_ID": str(host * local_world_size + local_rank),
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
        "TPU_PROCESS_PORT": str(base_port + local_rank),
    }


def worker_addresses(hosts: int) -> list[str]:
    """The addresses of the slice's hosts; ``localhost`` if it has one."""
    return ["localhost"] if hosts == 1 else environment.worker_ips()


def discover_master_worker_ip(use_localhost: bool = True) -> str:
    """The address of the slice's first host; with ``use_localhost`` (default), ``localhost`` for a single host.

    Raises RuntimeError if the slice is unknown.
    """
    hosts, _ = slice_bounds(environment.get_tpu_env())
    if use_localhost and math.prod(hosts) == 1:
        return "localhost"
    return environment.worker_ips()[0]


def bounds(name: str, text: str) -> tuple[int, ...]:
    """Three numbers from text such as ``2,2,1``. Raises ValueError, naming ``name``, for other text."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(MSG_BAD_BOUNDS.format(name=name, text=text))
    return tuple(map(int, parts))


def _text(bounds: Sequence[int]) -> str:
    return ",".join(map(str, bounds))
