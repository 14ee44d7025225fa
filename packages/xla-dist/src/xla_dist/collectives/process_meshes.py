"""``DeviceMesh("xla", ...)`` over the processes of a job: each dimension has its process groups.

torch makes none for ``xla``, whose meshes are for it the devices of one program (SPMD mode).
"""

from __future__ import annotations

import torch.distributed as dist

from xla_core.extension_api import runtime
from xla_core.extension_api.distributed import draw_for_dtensors_with
from xla_core.extension_api.meshes import ShardedNumbers

_numbers = ShardedNumbers()


def is_over_processes(size: int) -> bool:
    """Whether a new mesh of this number of members is one of processes; joins the default group if so.

    In SPMD mode it is one of devices, as is one that is larger than the job without a default group.
    """
    if runtime.is_spmd():
        return False
    if not dist.is_initialized():
        if size > runtime.world_size():
            return False
        dist.init_process_group("xla", init_method="xla://")
    draw_for_dtensors_with(_numbers)
    return True
