"""``DeviceMesh("xla", ...)`` over the processes of a job, with process groups for each dimension.

Without this, torch creates no process groups for a mesh of ``xla`` devices: it takes the mesh for the devices of
one program (SPMD mode).
"""

from __future__ import annotations

import torch.distributed as dist

from xla_core.extension_api import runtime
from xla_core.extension_api.distributed import draw_for_dtensors_with
from xla_core.extension_api.meshes import ShardedNumbers

_numbers = ShardedNumbers()


def is_over_processes(size: int) -> bool:
    """Whether a new mesh with ``size`` members is a mesh of processes; creates the default process group if it is.

    In SPMD mode a mesh is one of devices. So is a mesh with more members than the job has replicas, as long as
    there is no default process group.
    """
    if runtime.is_spmd():
        return False
    if not dist.is_initialized():
        if size > runtime.world_size():
            return False
        dist.init_process_group("xla", init_method="xla://")
    draw_for_dtensors_with(_numbers)
    return True
