"""Names of torch_xla's C++ module ``_XLAC`` about devices, processes and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xla_core.api import xla_model
from xla_core.api.device_info import cached_program_count as _xla_get_num_cached_compilation_graph
from xla_core.api.device_info import device_attributes as _xla_get_device_attributes
from xla_core.api.xla_model import memory_info as _xla_memory_info
from xla_core.api.xla_model import process_count as _xla_get_num_processes
from xla_core.api.xla_model import process_index as _xla_get_process_index
from xla_core.execution import runtime, spmd_mode
from xla_core.execution.ordinals import addressable_device_count as _xla_num_devices
from xla_core.execution.ordinals import addressable_runtime_device_count as _xla_num_runtime_devices
from xla_core.execution.ordinals import global_device_attributes as _xla_get_all_device_attributes
from xla_core.execution.ordinals import global_device_count as _xla_num_global_devices
from xla_core.recording.xla_tensor import XLATensor

MSG_NOT_XLA: Final = "Input tensor is not an XLA tensor: {type}"
MSG_SPMD_LATE: Final = (
    "this process already uses its devices one by one; for programs over all of them, install the "
    "package xla-spmd and call torch_xla.runtime.use_spmd() at the start of the script"
)


def _xla_get_runtime_devices() -> list[str]:
    """The runtime's names of this process's devices: ``['CPU:0']``."""
    return xla_model.real_devices()


def _xla_get_all_devices() -> list[str]:
    """The runtime's names of all devices of the job: ``['CPU:0']``."""
    kind = runtime.device_type()
    return [f"{kind}:{d.id}" for d in runtime.client().devices()]


def _xla_get_default_device_ordinal() -> int:
    """The index of the calling thread's current device."""
    return int(xla_model.device().index)


def _xla_set_default_device(device: str) -> str:
    """Make ``device`` (``'xla:1'``) the calling thread's current device; returns the name of the former one.

    Raises RuntimeError for a device that does not exist.
    """
    former = str(xla_model.device())
    xla_model.device(int(runtime.trace_of(device).device.index))
    return former


def _xla_get_device_ordinal(device: str) -> int:
    """The index of the ``xla`` device with this name: ``'xla:1'``, or the runtime's ``'CPU:1'``."""
    kind, _, number = device.partition(":")
    if kind.lower() == "xla":
        return int(runtime.trace_of(device).device.index)
    return _xla_get_runtime_devices().index(f"{kind.upper()}:{number or 0}")


def _xla_get_device_hw_type(tensor: torch.Tensor) -> str:
    """``'CPU'``, ``'TPU'``, ...: the hardware of a tensor's device. Raises RuntimeError unless it is ``xla``."""
    if not isinstance(tensor, XLATensor):
        raise RuntimeError(MSG_NOT_XLA.format(type=torch.Tensor.type(tensor)))
    return xla_model.device_hardware(tensor.device)


def _xla_get_platform_version() -> str:
    """The versions and flags that the device client reports, as lines ``name: value``."""
    return "\n".join(f"{k}: {v}" for k, v in sorted(runtime.client().fingerprint().items()))


def _xla_get_rng_seed(device: str = "") -> int:
    """The random state of one device (default: the current one)."""
    return xla_model.get_rng_state(device or None)


def _xla_set_rng_seed(seed: int = 101, device: str = "") -> None:
    """Set the random state of one device (default: the current one)."""
    xla_model.set_rng_state(seed, device or None)


def _get_seed_info_id() -> int:
    """The id that stands for the random state among a graph's inputs; it is no tensor's id."""
    return -127389


def _get_base_seed_as_tensor(device: str = "") -> torch.Tensor:
    """The random state of one device (default: the current one) as an int64 tensor of shape () there."""
    trace = runtime.trace_of(device or None)
    return torch.tensor(xla_model.get_rng_state(trace.device), device=trace.device)


def _xla_get_replication_devices() -> list[str]:
    """The runtime's names of the replicas' devices; empty without replicas."""
    kind = runtime.device_type()
    return [f"{kind}:{i}" for i in runtime.trace_of(None).backend.replicas]


def _xla_get_replication_devices_count() -> int:
    """The number of replicas that train together; 0 without replicas."""
    return len(_xla_get_replication_devices())


def _xla_set_replication_devices(devices: Sequence[str]) -> None:
    """Make the devices with these runtime names the replicas, in this order; an empty list means no replicas."""
    known = _xla_get_all_devices()
    ids = [d.id for d in runtime.client().devices()]
    runtime.set_replicas([ids[known.index(d)] for d in devices])


def _xla_get_spmd_config_is_locked() -> bool:
    """Whether the client runs, so that it is settled whether each device or all as one are ``xla`` devices."""
    return runtime.started()


def _xla_force_spmd_device() -> None:
    """Make one ``xla`` device of all devices, as ``xr.use_spmd()`` does.

    Raises RuntimeError if the client runs already with separate devices; call ``use_spmd()`` then.
    """
    if spmd_mode.is_spmd():
        return
    if runtime.started():
        raise RuntimeError(MSG_SPMD_LATE)
    spmd_mode.enable()


def _prepare_to_exit() -> None:
    """Wait until all launched programs have finished; does not start the client."""
    if runtime.started():
        runtime.wait()


def _get_git_revs() -> dict[str, str]:
    """The git revisions of PyTorch (``'torch'``) and of this project (``'xla'``: empty, as nothing is built)."""
    return {"torch": str(getattr(torch.version, "git_version", None) or ""), "xla": ""}


_xla_get_all_runtime_devices = _xla_get_all_devices

__all__ = [
    "_get_base_seed_as_tensor", "_get_git_revs", "_get_seed_info_id", "_prepare_to_exit",
    "_xla_force_spmd_device", "_xla_get_all_device_attributes", "_xla_get_all_devices",
    "_xla_get_all_runtime_devices", "_xla_get_default_device_ordinal", "_xla_get_device_attributes",
    "_xla_get_device_hw_type", "_xla_get_device_ordinal", "_xla_get_num_cached_compilation_graph",
    "_xla_get_num_processes", "_xla_get_platform_version", "_xla_get_process_index",
    "_xla_get_replication_devices", "_xla_get_replication_devices_count", "_xla_get_rng_seed",
    "_xla_get_runtime_devices", "_xla_get_spmd_config_is_locked", "_xla_memory_info",
    "_xla_num_devices", "_xla_num_global_devices", "_xla_num_runtime_devices",
    "_xla_set_default_device", "_xla_set_replication_devices", "_xla_set_rng_seed",
]  # fmt: skip
