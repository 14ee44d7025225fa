"""The names of ``torch_xla._internal.tpu``: the processes of a slice, its shape, the plugin of torch_xla's kind."""

from __future__ import annotations

import math
import os
from typing import Final, NamedTuple

from xla_core.pjrt.runtime_library import DevicePlugin
from xla_pjrt_tpu import environment, libtpu, processes
from xla_pjrt_tpu.processes import configure_one_chip_topology as configure_one_chip_topology
from xla_pjrt_tpu.processes import configure_topology as configure_topology
from xla_pjrt_tpu.processes import discover_master_worker_ip as discover_master_worker_ip
from xla_pjrt_tpu.processes import get_tpu_env as get_tpu_env
from xla_pjrt_tpu.processes import get_tpu_type as get_tpu_type
from xla_pjrt_tpu.processes import get_worker_ips as get_worker_ips
from xla_pjrt_tpu.processes import num_available_chips as num_available_chips
from xla_pjrt_tpu.processes import num_available_devices as num_available_devices
from xla_pjrt_tpu.processes import num_expected_global_devices as num_expected_global_devices
from xla_pjrt_tpu.processes import num_local_processes as num_local_processes
from xla_pjrt_tpu.processes import num_logical_cores_per_chip as num_logical_cores_per_chip
from xla_pjrt_tpu.processes import process_bounds_size as process_bounds_size
from xla_pjrt_tpu.processes import task_id as task_id
from xla_pjrt_tpu.processes import version as version
from xla_pjrt_tpu.processes import worker_id as worker_id

MSG_NO_LIBRARY: Final = (
    "no libtpu: install the package libtpu, or name the library's path with {variable}"
)


class MeshShape(NamedTuple):
    """Chips or hosts along three axes."""

    x: int
    y: int
    z: int

    @classmethod
    def from_string(cls, mesh: str) -> MeshShape:
        """The shape that text such as ``2,2,1`` says. Raises ValueError for other text."""
        x, y, z = processes.bounds("MeshShape", mesh)
        return cls(x, y, z)

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self)

    def to_string(self) -> str:
        """``2,2,1``."""
        return ",".join(map(str, self))

    def __mul__(self, other: MeshShape) -> MeshShape:  # type: ignore[override]
        return MeshShape(*(a * b for a, b in zip(self, other, strict=True)))


def build_tpu_env_from_vars() -> dict[str, str]:
    """What the environment variables say of the slice, under the names of ``tpu-env``."""
    return environment.from_variables()


def num_tpu_workers() -> int:
    """Hosts of the slice. Raises RuntimeError when the slice is unknown."""
    hosts, _ = processes.slice_bounds(environment.get_tpu_env())
    return math.prod(hosts)


class TpuPlugin(DevicePlugin):
    """TPUs as a plugin of torch_xla's kind; ``PJRT_DEVICE=TPU`` finds them without it."""

    platform = "tpu"

    def library_path(self) -> str:
        """The path of libtpu. Raises RuntimeError where there is none."""
        path = libtpu.find_library(os.environ)
        if path is None:
            raise RuntimeError(MSG_NO_LIBRARY.format(variable="TPU_LIBRARY_PATH"))
        return str(path)

    def host_index(self) -> int:
        """The number of this host in its slice."""
        return processes.worker_id()

    def physical_chip_count(self) -> int:
        """TPU chips of this host."""
        return processes.num_available_chips()

    def configure_single_process(self) -> None:
        """One process has the slice as the host sees it."""
        processes.configure_topology(0, 1)

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Each process has one chip."""
        processes.configure_topology(local_rank, local_world_size)

    def requires_xla_coordinator(self) -> bool:
        """True: processes of a slice meet through it."""
        return True
