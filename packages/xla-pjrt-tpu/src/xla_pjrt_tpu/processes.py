"""The processes of a slice: how many, which chips each has, where they meet (``torch_xla._internal.tpu``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Final

from xla_core.support import flags
from xla_pjrt_tpu import chips, environment, settings
from xla_pjrt_tpu.hardware import GENERATIONS, generation, parse_accelerator_type

BASE_PORT: Final = 8476
"""The port of a host's first process; the others follow. libtpu's own default."""

MSG_BAD_BOUNDS: Final = "{name} is {text!r}; write three numbers such as 2,2,1"


def num_available_chips() -> int:
    """TPU chips of this host on its PCI bus; 0 where there is none. Asks no network."""
    return chips.find_chips().count


def version() -> int:
    """The generation's number: 2, 3, 4, 5 (v5e and v5p), 6 or 7.

    Raises RuntimeError when this host has no TPU and its environment names none.
    """
    name = chips.version_name(os.environ, chips.find_chips())
    if name is None:
        name = generation(environment.get_tpu_type().rpartition("-")[0]).name
    return GENERATIONS[name].number


def num_logical_cores_per_chip() -> int:
    """Devices that a chip is shown as: 2 for v2, v3 and v7x, else 1."""
    name = chips.version_name(os.environ, chips.find_chips())
    return GENERATIONS[name].devices if name is not None else 1


def num_available_devices() -> int:
    """TPU devices of this host, or ``TPU_NUM_DEVICES``; 0 where there is no TPU. Asks no network."""
    named = settings.NUM_DEVICES.text()
    if named:
        return int(named)
    chips = num_available_chips()
    return chips * num_logical_cores_per_chip() if chips else 0


def num_local_processes() -> int:
    """Processes that share this host's chips: one per visible chip."""
    visible = settings.VISIBLE_CHIPS.text()
    return len(visible.split(",")) if visible else num_available_chips()


def task_id() -> int | None:
    """This process's number in the slice (``CLOUD_TPU_TASK_ID``), None where it is not set."""
    text = flags.CLOUD_TPU_TASK_ID.text()
    return int(text) if text else None


def worker_id() -> int:
    """The number of this host in its slice. Raises RuntimeError when it is unknown."""
    return environment.worker_id()


def get_worker_ips() -> list[str]:
    """The addresses of the slice's hosts. Raises RuntimeError when they are unknown."""
    return environment.worker_ips()


def get_tpu_env() -> dict[str, str]:
    """The slice's description, as ``tpu-env`` has it. Raises RuntimeError when it is unknown."""
    return environment.get_tpu_env()


def get_tpu_type() -> str:
    """The accelerator type. Raises RuntimeError when it is unknown."""
    return environment.get_tpu_type()


def process_bounds_size(default: int = 1) -> int:
    """Processes in the slice, as ``TPU_PROCESS_BOUNDS`` says; ``default`` without it."""
    text = settings.PROCESS_BOUNDS.text()
    return math.prod(bounds("TPU_PROCESS_BOUNDS", text)) if text else default


def num_expected_global_devices() -> int:
    """Devices of the whole slice, from its bounds. Raises RuntimeError when they are unknown."""
    env = environment.get_tpu_env()
    hosts, host_chips = slice_bounds(env)
    return math.prod(hosts) * math.prod(host_chips) * num_logical_cores_per_chip()


def slice_bounds(env: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Hosts of the slice along each axis, and chips of a host; from bounds, else the accelerator type.

    Raises ValueError for malformed bounds or an unknown type.
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
    """Let this process use the host's first chip alone, unless its environment says otherwise."""
    os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_VISIBLE_CHIPS", "0")


def configure_topology(local_rank: int, local_world_size: int, base_port: int = BASE_PORT) -> None:
    """Set the environment of process ``local_rank`` of ``local_world_size`` on this host.

    One process has one chip, or, if it is alone on the host, the slice as the host sees it. What the
    environment says already is kept. Call it before the client starts. Raises RuntimeError when the
    slice is unknown, ValueError when the number of processes is not the number of chips.
    """
    for name, value in topology_variables(local_rank, local_world_size, base_port).items():
        os.environ.setdefault(name, value)


def topology_variables(
    local_rank: int, local_world_size: int, base_port: int = BASE_PORT
) -> dict[str, str]:
    """What ``configure_topology`` sets."""
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
    """The addresses of ``hosts`` hosts: ``localhost`` for one alone, else as the slice says."""
    return ["localhost"] if hosts == 1 else environment.worker_ips()


def discover_master_worker_ip(use_localhost: bool = True) -> str:
    """The address of the slice's first host; ``localhost`` for a slice of one host, if wanted.

    Raises RuntimeError when it is unknown.
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
