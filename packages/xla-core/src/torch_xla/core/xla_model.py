"""torch_xla.core.xla_model (xm): the functions that training scripts call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_xla._packages import lazy_names
from xla_core.api import xla_model
from xla_core.api.deprecated import get_ordinal as get_ordinal
from xla_core.api.deprecated import xrt_world_size as xrt_world_size
from xla_core.api.device_info import device_kind as xla_device_kind
from xla_core.api.stablehlo_text import stablehlo_bytecode as get_stablehlo_bytecode
from xla_core.api.stablehlo_text import stablehlo_text as get_stablehlo
from xla_core.api.xla_model import MemoryInfo as MemoryInfo
from xla_core.api.xla_model import check_view_sharing as check_view_sharing
from xla_core.api.xla_model import fork_rng as fork_rng
from xla_core.api.xla_model import get_rng_state as get_rng_state
from xla_core.api.xla_model import gradients as _fetch_gradients
from xla_core.api.xla_model import is_master_ordinal as is_master_ordinal
from xla_core.api.xla_model import is_xla_tensor as is_xla_tensor
from xla_core.api.xla_model import master_print as master_print
from xla_core.api.xla_model import optimizer_step as optimizer_step
from xla_core.api.xla_model import real_name as _xla_real_device
from xla_core.api.xla_model import save as save
from xla_core.api.xla_model import set_rng_state as set_rng_state
from xla_core.api.xla_model import unlazy as unlazy
from xla_core.api.xla_model import wait_device_ops as wait_device_ops
from xla_core.execution import step_closures
from xla_core.execution.ordinals import local_ordinal as get_local_ordinal
from xla_core.recording.tensor_trees import ToXlaTensorArena as ToXlaTensorArena
from xla_core.recording.tensor_trees import listed_on_device as send_cpu_data_to_device
from xla_core.support.rate_tracker import RateTracker as RateTracker
from xla_core.torch_bridge.op_library import XLA_LIB as XLA_LIB
from xla_core.torch_features.optimization_barrier import (
    optimization_barrier_ as optimization_barrier_,
)

# Operations of several replicas are in the packages xla-dist and xla-spmd.
_HOMES = {
    "xla_dist.collectives.buckets": (
        "CoalescingBuckets all_gather_bucketized all_reduce_bucketized_gradients "
        "reduce_scatter_bucketized"
    ),
    "xla_dist.collectives.model_collectives": (
        "REDUCE_AND REDUCE_MAX REDUCE_MIN REDUCE_MUL REDUCE_OR REDUCE_SUM all_gather all_reduce "
        "all_to_all collective_broadcast collective_permute recv reduce_scatter send"
    ),
    "xla_dist.data_parallel.gradients": (
        "broadcast_master_param reduce_gradients set_replication xla_replication_devices"
    ),
    "xla_dist.processes.wrappers": "create_optimized_replica_groups",
    "xla_spmd.tensors.input_sharding": "ShardingSpec",
    "xla_dist.processes.rendezvous": "do_on_ordinals mesh_reduce rendezvous xla_rendezvous",
}
__getattr__, __dir__ = lazy_names(
    __name__, {name: home for home, names in _HOMES.items() for name in names.split()}
)

mark_step = xla_model.sync
_maybe_convert_to_cpu = xla_model.to_cpu


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The ``xla`` device number ``n``, which becomes the current one (default: the current one).

    Raises RuntimeError if there is no device, or none of kind ``devkind`` (``'CPU'``, ``'TPU'``; default: any), and
    IndexError if no device has the number ``n``.
    """
    if devkind is not None and devkind.upper() != xla_device_hw("xla"):
        raise RuntimeError(
            f"there is no {devkind} device; this process has {xla_model.real_devices()}"
        )
    return xla_model.device(n)


def xla_device_hw(device: torch.device | str) -> str:
    """``'CPU'``, ``'TPU'``, ...: the hardware behind a device."""
    return xla_model.device_hardware(device)


def xla_real_devices(devices: Sequence[torch.device | str] | None = None) -> list[str]:
    """The runtime's names of ``xla`` devices (default: all), such as ``CPU:0``."""
    return [xla_model.real_name(d) for d in devices or xla_model.devices()]


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """The names of the ``xla`` devices of this process, at most ``max_devices``."""
    return [str(d) for d in xla_model.devices()][:max_devices]


def get_memory_info(device: torch.device | str | None = None) -> MemoryInfo:
    """Memory of a device (default: the current one).

    ``bytes_used``, ``bytes_limit`` and ``peak_bytes_used`` are bytes, ``kb_free`` and ``kb_total`` KiB; a limit
    that the device does not report is None.
    """
    return xla_model.memory_info(device)


def add_step_closure(
    closure: Callable[..., object], args: Sequence[object] = (), run_async: bool = False
) -> None:
    """Call ``closure(*args)`` at the end of the current step, when the tensors in ``args`` have values.

    With ``run_async`` (default: False) it runs in a thread of its own, and the next sync raises what it raised.
    """
    step_closures.add(xla_model.device(), closure, args, run_async)
