"""torch_xla.core.xla_model (xm): the functions that training scripts call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._packages import lazy_names
from xla_core import model_api, step_closures
from xla_core.barrier import optimization_barrier_ as optimization_barrier_
from xla_core.deprecated import get_ordinal as get_ordinal
from xla_core.deprecated import xrt_world_size as xrt_world_size
from xla_core.device_info import device_kind as xla_device_kind
from xla_core.graph_text import stablehlo_bytecode as get_stablehlo_bytecode
from xla_core.graph_text import stablehlo_text as get_stablehlo
from xla_core.model_api import check_view_sharing as check_view_sharing
from xla_core.model_api import fork_rng as fork_rng
from xla_core.model_api import get_rng_state as get_rng_state
from xla_core.model_api import gradients as _fetch_gradients
from xla_core.model_api import is_master_ordinal as is_master_ordinal
from xla_core.model_api import is_xla_tensor as is_xla_tensor
from xla_core.model_api import master_print as master_print
from xla_core.model_api import optimizer_step as optimizer_step
from xla_core.model_api import real_name as _xla_real_device
from xla_core.model_api import save as save
from xla_core.model_api import set_rng_state as set_rng_state
from xla_core.model_api import unlazy as unlazy
from xla_core.model_api import wait_device_ops as wait_device_ops
from xla_core.operators import XLA_LIB as XLA_LIB
from xla_core.ordinals import local_ordinal as get_local_ordinal
from xla_core.rates import RateTracker as RateTracker
from xla_core.transfer import ToXlaTensorArena as ToXlaTensorArena
from xla_core.transfer import send_cpu_data_to_device as send_cpu_data_to_device

# What several replicas do together is in the package xla-dist.
_HOMES = {
    "xla_dist.buckets": (
        "CoalescingBuckets all_gather_bucketized all_reduce_bucketized_gradients "
        "reduce_scatter_bucketized"
    ),
    "xla_dist.collectives": (
        "REDUCE_AND REDUCE_MAX REDUCE_MIN REDUCE_MUL REDUCE_OR REDUCE_SUM all_gather all_reduce "
        "all_to_all collective_broadcast collective_permute recv reduce_scatter send"
    ),
    "xla_dist.gradients": (
        "broadcast_master_param reduce_gradients set_replication xla_replication_devices"
    ),
    "xla_dist.rendezvous": "do_on_ordinals mesh_reduce rendezvous xla_rendezvous",
}
__getattr__, __dir__ = lazy_names(
    __name__, {name: home for home, names in _HOMES.items() for name in names.split()}
)

mark_step = model_api.sync
_maybe_convert_to_cpu = model_api.to_cpu


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The ``xla`` device number ``n``, or the current one.

    Raises RuntimeError when there is no device, or none of kind ``devkind``.
    """
    if devkind is not None and devkind.upper() != xla_device_hw("xla"):
        raise RuntimeError(
            f"there is no {devkind} device; this process has {model_api.real_devices()}"
        )
    return model_api.device(n)


def xla_device_hw(device: torch.device | str) -> str:
    """``'CPU'``, ``'TPU'``, ...: the hardware behind a device."""
    return model_api.device_hardware(device)


def xla_real_devices(devices: Sequence[torch.device | str] | None = None) -> list[str]:
    """The runtime's names of ``xla`` devices (default: all), such as ``CPU:0``."""
    return [model_api.real_name(d) for d in devices or model_api.devices()]


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """The names of the ``xla`` devices of this process, at most ``max_devices``."""
    return [str(d) for d in model_api.devices()][:max_devices]


def get_memory_info(device: torch.device | str | None = None) -> dict[str, int | None]:
    """``bytes_used``, ``bytes_limit`` and ``peak_bytes_used`` of a device; also ``kb_free, kb_total``."""
    return model_api.memory_info(device)


def add_step_closure(
    closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False
) -> None:
    """Call ``closure(*args)`` at the end of the current step, when the tensors in ``args`` have values.

    With ``run_async`` it runs in a thread of its own; what it raises is raised by the next sync.
    """
    step_closures.add(model_api.device(), closure, args, run_async)
