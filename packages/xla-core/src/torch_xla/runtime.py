"""torch_xla.runtime (xr): devices, processes and the compilation cache."""

from __future__ import annotations

from xla_core import persistent_cache, runtime
from xla_core.model_api import device_count as addressable_device_count
from xla_core.model_api import global_ordinal as global_ordinal
from xla_core.model_api import process_count as process_count
from xla_core.model_api import process_index as process_index
from xla_core.model_api import world_size as world_size
from xla_core.runtime import set_device_type as set_device_type

__all__ = [
    "addressable_device_count",
    "device_type",
    "global_ordinal",
    "initialize_cache",
    "process_count",
    "process_index",
    "set_device_type",
    "world_size",
]


def device_type() -> str:
    """``'CPU'``, ``'TPU'`` or the name of another plugin: from ``PJRT_DEVICE``, else what is there."""
    return runtime.device_type()


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in the directory ``path`` and look for them there.

    With ``readonly`` nothing is written. Call it before the first computation. Loading a program
    runs code from its file: use a directory that only you can write to.
    """
    persistent_cache.initialize(path, readonly=readonly)
