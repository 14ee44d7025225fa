"""torch_xla._internal.tpu: the TPU chips of this host and the processes of a slice (xla-pjrt-tpu)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

_NAMES = (
    "MeshShape",
    "TpuPlugin",
    "build_tpu_env_from_vars",
    "num_tpu_workers",
    "configure_one_chip_topology",
    "configure_topology",
    "discover_master_worker_ip",
    "get_tpu_env",
    "get_tpu_type",
    "get_worker_ips",
    "num_available_chips",
    "num_available_devices",
    "num_expected_global_devices",
    "num_local_processes",
    "num_logical_cores_per_chip",
    "process_bounds_size",
    "task_id",
    "version",
    "worker_id",
)

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(_NAMES, "xla_pjrt_tpu.torch_xla_names"))
