"""torch_xla.runtime (xr): devices, processes and the compilation cache."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.api.deprecated import using_pjrt as using_pjrt
from xla_core.api.device_info import cached_program_count as get_num_cached_compilation_graph
from xla_core.api.device_info import clear_program_cache as clear_computation_cache
from xla_core.api.device_info import device_attributes as runtime_device_attributes
from xla_core.compilation import disk_cache
from xla_core.execution import runtime
from xla_core.execution.ordinals import addressable_device_count as addressable_device_count
from xla_core.execution.ordinals import (
    addressable_runtime_device_count as addressable_runtime_device_count,
)
from xla_core.execution.ordinals import global_device_attributes as global_runtime_device_attributes
from xla_core.execution.ordinals import global_device_count as global_device_count
from xla_core.execution.ordinals import global_ordinal as global_ordinal
from xla_core.execution.ordinals import global_runtime_device_count as global_runtime_device_count
from xla_core.execution.ordinals import host_index as host_index
from xla_core.execution.ordinals import local_device_count as local_device_count
from xla_core.execution.ordinals import local_ordinal as local_ordinal
from xla_core.execution.ordinals import local_process_count as local_process_count
from xla_core.execution.ordinals import master_ip as get_master_ip
from xla_core.execution.ordinals import process_count as process_count
from xla_core.execution.ordinals import process_index as process_index
from xla_core.execution.ordinals import world_size as world_size
from xla_core.execution.runtime import device_type as _maybe_select_default_device
from xla_core.execution.runtime import set_device_type as set_device_type
from xla_core.execution.runtime import traces as _init_world_size_ordinal
from xla_core.execution.spmd_mode import is_spmd as is_spmd
from xla_core.plugins.discovery import NoDeviceChosenError

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "clear_computation_cache",
    "device_type",
    "get_master_ip",
    "get_num_cached_compilation_graph",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "runtime_device_attributes",
    "set_device_type",
    "world_size",
]

# not in __all__: `from torch_xla.runtime import *` must work without the package xla-spmd
__getattr__, __dir__ = lazy_names(__name__, {"use_spmd": "xla_spmd.sharding.mode"})


def device_type() -> str | None:
    """``'CPU'``, ``'TPU'`` or the name of another plugin: the value of ``PJRT_DEVICE``, or the best one available.

    None if ``PJRT_DEVICE`` is not set and ``PJRT_SELECT_DEFAULT_DEVICE=0`` forbids a choice; using the device then
    raises an error.
    """
    try:
        return runtime.device_type()
    except NoDeviceChosenError:
        return None


def is_bf16_supported() -> bool:
    """True: every device computes with bfloat16, natively or through float32."""
    return True


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Use the directory ``path`` as the persistent cache of compiled programs.

    With ``readonly`` (default: False) nothing is written. Call it before the first computation. Loading a program
    runs code from its file, so use a directory that only you can write to.
    """
    runtime.initialize_cache(path, readonly=readonly)
