"""The process's devices, the replicas that they are of a job, and whether they are used as one (SPMD)."""

from __future__ import annotations

from xla_core.api.xla_model import device, devices, memory_info, real_name
from xla_core.execution.ordinals import (
    global_ordinal,
    is_master_ordinal,
    process_count,
    process_index,
    replica_of,
    world_size,
)
from xla_core.execution.runtime import (
    client,
    current_device,
    device_type,
    is_ahead_of_time,
    process_replicas,
    reattach,
    set_replicas,
    settle,
    started,
    trace_of,
    traces,
    use_topology,
    wait,
)
from xla_core.execution.spmd_mode import enable as enable_spmd
from xla_core.execution.spmd_mode import is_spmd
from xla_core.pjrt.client import DEVICE_CODE

__all__ = [
    "DEVICE_CODE",
    "client",
    "current_device",
    "device",
    "device_type",
    "devices",
    "enable_spmd",
    "global_ordinal",
    "is_ahead_of_time",
    "is_master_ordinal",
    "is_spmd",
    "memory_info",
    "process_count",
    "process_index",
    "process_replicas",
    "real_name",
    "reattach",
    "replica_of",
    "set_replicas",
    "settle",
    "started",
    "trace_of",
    "traces",
    "use_topology",
    "wait",
    "world_size",
]
