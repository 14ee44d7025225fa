"""The names of ``torch_xla._internal.tpu``: the processes and the shape of a slice, and ``TpuPlugin``."""

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
    "there is no libtpu: install the package libtpu, or set {variable} to the library's path"
)


class MeshShape(NamedTuple):
    """Numbers of chips or hosts along three axes."""

    x: int
    y: int
    z: int

    @classmethod
    def from_string(cls, mesh: str) -> MeshShape:
        """The shape for text such as ``2,2,1``. Raises ValueError for other text."""
        x, y, z = processes.bounds("MeshShape", mesh)
        return cls(x, y, z)

    @property
    def size(self) -> int:
        """The number of chips or hosts."""
        return math.prod(self)

    def to_string(self) -> str:
        """The shape as text, such as ``2,2,1``."""
        return ",".join(map(str, self))

    def __mul__(self, other: MeshShape) -> MeshShape:  # type: ignore[override]
        return MeshShape(*(a * b for a, b in zip(self, other, strict=True)))


def build_tpu_env_from_vars() -> dict[str, str]:
    """The description of the slice in the environment variables, under the names of ``tpu-env``."""
    return environment.from_variables()


def num_tpu_workers() -> int:
    """The number of hosts of the slice. Raises RuntimeError if the slice is unknown."""
    hosts, _ = processes.slice_bounds(environment.get_tpu_env())
    return math.prod(hosts)


class TpuPlugin(DevicePlugin):
    """TPUs as a ``DevicePlugin`` of torch_xla; ``PJRT_DEVICE=TPU`` works without it."""

    platform = "tpu"

    def library_path(self) -> str:
        """The path of libtpu. Raises RuntimeError if there is none."""
        path = libtpu.find_library(os.environ)
        if path is None:
            raise RuntimeError(MSG_NO_LIBRARY.format(variable="TPU_LIBRARY_PATH"))
        return str(path)

    def host_index(self) -> int:
        """The number of this host in its slice."""
        return processes.worker_id()

    def physical_chip_count(self) -> int:
        """The number of TPU chips of this host."""
        return processes.num_available_chips()

    def configure_single_process(self) -> None:
        """Set the environment of a single process, which has the slice as the host sees it."""
        processes.configure_topology(0, 1)

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Set the environment of process ``local_rank`` of ``local_world_size``, which has one chip."""
        processes.configure_topology(local_rank, local_world_size)

    def requires_xla_coordinator(self) -> bool:
        """True: the processes of a slice find each other through the coordinator."""
        return True
