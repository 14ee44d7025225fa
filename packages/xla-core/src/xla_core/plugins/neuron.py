"""AWS Neuron devices: sets the cores of a process, and the address at which its runtime finds the other processes.

The variables are those of the Neuron runtime and of its PJRT plugin. Variables that are already set stay, except
the visible cores: each process of a host gets its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Final

from xla_core.plugins.torch_xla_plugins import DevicePlugin
from xla_core.support import flags

VISIBLE_CORES: Final = flags.NEURON_RT_VISIBLE_CORES.name
ROOT_COMM_ID: Final = flags.NEURON_RT_ROOT_COMM_ID.name
PROCESS_INDEX: Final = "NEURON_PJRT_PROCESS_INDEX"
PROCESSES_NUM_DEVICES: Final = "NEURON_PJRT_PROCESSES_NUM_DEVICES"
ROOT_PORT: Final = 62182

MSG_RANGE: Final = "{name}={text!r}: write core numbers and ranges of them, such as 0-3,8"
MSG_CORES: Final = (
    "process {rank} of {count} on this host finds {cores} visible cores ({name}={text!r}); list one core for "
    "each process, or leave the variable out to let each process choose"
)
MSG_NO_LIBRARY: Final = (
    "device NEURON needs the package libneuronxla (from AWS's index), or {name} with "
    "the path of its PJRT library"
)


def convert_range(range_spec: str) -> list[int]:
    """The numbers that text such as ``0-3,8`` lists. Raises ValueError for other text."""
    numbers: list[int] = []
    for part in range_spec.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(MSG_RANGE.format(name=VISIBLE_CORES, text=range_spec))
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def get_visible_cores_list() -> list[int] | None:
    """The numbers of the cores that are visible to this process; None if the environment does not limit them."""
    text = flags.NEURON_RT_VISIBLE_CORES.text()
    return convert_range(text) if text else None


def remap_visible_cores(local_rank: int, local_world_size: int) -> None:
    """Make only core number ``local_rank`` of the host's visible cores visible to this process.

    A single process keeps all. Raises ValueError if there is not one core for each process.
    """
    cores = get_visible_cores_list()
    if cores is None or local_world_size == 1:
        return
    if len(cores) != local_world_size:
        raise ValueError(
            MSG_CORES.format(
                rank=local_rank,
                count=local_world_size,
                cores=len(cores),
                name=VISIBLE_CORES,
                text=flags.NEURON_RT_VISIBLE_CORES.text(),
            )
        )
    os.environ[VISIBLE_CORES] = str(cores[local_rank])


def num_local_processes() -> int:
    """The number of this host's processes: one per visible core, or ``NEURONCORE_NUM_DEVICES`` (default: 1)."""
    cores = get_visible_cores_list()
    return len(cores) if cores else int(flags.NEURONCORE_NUM_DEVICES.text() or 1)


def get_master_worker_ip() -> str:
    """The host at which the processes meet: ``NEURON_RT_ROOT_COMM_ID``'s, ``MASTER_ADDR``, or localhost."""
    root = flags.NEURON_RT_ROOT_COMM_ID.text()
    if root:
        return root.rpartition(":")[0].strip("[]")
    return os.environ.get("MASTER_ADDR", "localhost")


def set_rt_root_comm_id() -> None:
    """Set the address at which the runtime's processes meet, unless it is set."""
    host = get_master_worker_ip()
    in_address = f"[{host}]" if ":" in host else host
    os.environ.setdefault(ROOT_COMM_ID, f"{in_address}:{ROOT_PORT}")


def set_envvar_defaults() -> None:
    """Set the runtime's variables for a single process, unless they are set."""
    os.environ.setdefault("NEURON_USE_LOAD_COLLECTIVES", "1")
    os.environ.setdefault("NEURON_GLOBAL_DEVICE_ID", "0")
    os.environ.setdefault("NEURON_GLOBAL_DEVICE_COUNT", "1")


def configure_pjrt_environment() -> None:
    """Set the PJRT plugin's variables for the job of ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``."""
    rank, world = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault(PROCESS_INDEX, rank)
    os.environ.setdefault(PROCESSES_NUM_DEVICES, ",".join(["1"] * world))
    set_rt_root_comm_id()


def initialize_env(local_rank: int, local_world_size: int) -> None:
    """Set the environment of process ``local_rank`` of the ``local_world_size`` processes of this host."""
    remap_visible_cores(local_rank, local_world_size)
    if local_world_size > 1:
        set_rt_root_comm_id()
        set_envvar_defaults()


class NeuronPlugin(DevicePlugin):
    """The plugin of Neuron cores, with the PJRT library of the package libneuronxla."""

    def library_path(self) -> str:
        """``NEURON_LIBRARY_PATH``, or the path of the package's library. Raises RuntimeError without either."""
        path = flags.NEURON_LIBRARY_PATH.text()
        if path:
            return path
        if importlib.util.find_spec("libneuronxla") is None:
            raise RuntimeError(MSG_NO_LIBRARY.format(name=flags.NEURON_LIBRARY_PATH.name))
        package: ModuleType = importlib.import_module("libneuronxla.libneuronpjrt_path")
        return str(Path(package.libneuronpjrt_path()))

    def configure_single_process(self) -> None:
        """Set the environment of a single process, which keeps all visible cores."""
        initialize_env(0, 1)

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Set the environment of process ``local_rank`` of ``local_world_size``, which has one core."""
        initialize_env(local_rank, local_world_size)

    def physical_chip_count(self) -> int:
        """The number of this host's cores that may be used."""
        return num_local_processes()
