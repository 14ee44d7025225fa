"""lazy_tensor_core.core.lazy_model (ltm): xla_model under Lazy Tensor Core's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_core.api import xla_model
from xla_core.api.xla_model import device_hardware as lazy_device_hw
from xla_core.api.xla_model import fork_rng as fork_rng
from xla_core.api.xla_model import get_rng_state as get_rng_state
from xla_core.api.xla_model import is_master_ordinal as is_master_ordinal
from xla_core.api.xla_model import is_xla_tensor as is_lazy_tensor
from xla_core.api.xla_model import master_print as master_print
from xla_core.api.xla_model import memory_info as get_memory_info
from xla_core.api.xla_model import optimizer_step as optimizer_step
from xla_core.api.xla_model import save as save
from xla_core.api.xla_model import set_rng_state as set_rng_state
from xla_core.api.xla_model import sync as mark_step
from xla_core.api.xla_model import unlazy as unlazy
from xla_core.api.xla_model import wait_device_ops as wait_device_ops
from xla_core.execution import step_closures
from xla_core.execution.ordinals import global_ordinal as get_ordinal
from xla_core.execution.ordinals import local_ordinal as get_local_ordinal
from xla_core.recording.tensor_trees import ToXlaTensorArena as ToLazyTensorArena
from xla_core.recording.tensor_trees import listed_on_device as send_cpu_data_to_device
from xla_core.support.rate_tracker import RateTracker as RateTracker

_maybe_convert_to_cpu = xla_model.to_cpu


def lazy_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The lazy device number ``n``, which becomes the current one (default: the current one).

    Its name is ``xla:0``, see the package. Raises RuntimeError if there is no device of kind ``devkind``
    (``'CPU'``,
    ``'TPU'``; default: any), IndexError if none has the number ``n``.
    """
    if devkind is not None and devkind.upper() != lazy_device_hw("xla"):
        raise RuntimeError(
            f"there is no {devkind} device; this process has {xla_model.real_devices()}"
        )
    return xla_model.device(n)


def get_lazy_supported_devices(max_devices: int | None = None) -> list[str]:
    """The names of this process's lazy devices, at most ``max_devices``."""
    return [str(d) for d in xla_model.devices()][:max_devices]


def lazy_real_devices(devices: Sequence[torch.device | str] | None = None) -> list[str]:
    """The runtime's names of lazy devices (default: all), such as ``CPU:0``."""
    return [xla_model.real_name(d) for d in devices or xla_model.devices()]


def add_step_closure(
    closure: Callable[..., object], args: Sequence[object] = (), run_async: bool = False
) -> None:
    """Call ``closure(*args)`` at the end of the current step, when the tensors in ``args`` have values.

    With ``run_async`` (default: False) it runs in a thread of its own, and the next sync raises what it raised.
    """
    step_closures.add(xla_model.device(), closure, args, run_async)
