"""torch_xla.core.xla_model (xm), as far as one process and one device go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_core import model_api, step_closures
from xla_core.model_api import get_rng_state as get_rng_state
from xla_core.model_api import is_master_ordinal as is_master_ordinal
from xla_core.model_api import is_xla_tensor as is_xla_tensor
from xla_core.model_api import master_print as master_print
from xla_core.model_api import optimizer_step as optimizer_step
from xla_core.model_api import save as save
from xla_core.model_api import set_rng_state as set_rng_state
from xla_core.model_api import unlazy as unlazy
from xla_core.model_api import wait_device_ops as wait_device_ops

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
    """``bytes_used``, ``bytes_limit`` and ``peak_bytes_used`` of a device."""
    return model_api.memory_info(device)


def add_step_closure(
    closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False
) -> None:
    """Call ``closure(*args)`` at the end of the current step, when the tensors in ``args`` have values.

    With ``run_async`` it runs in a thread of its own; what it raises is raised by the next sync.
    """
    step_closures.add(model_api.device(), closure, args, run_async)
