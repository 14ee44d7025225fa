"""The functions of the ``torch_xla`` package itself."""

from __future__ import annotations

import torch

from torch_xla._packages import lazy_names
from xla_core.api import xla_model
from xla_core.api.compile_decorator import compile as compile
from xla_core.api.compile_decorator import step as step
from xla_core.api.xla_model import device as device
from xla_core.api.xla_model import device_count as device_count
from xla_core.api.xla_model import devices as devices
from xla_core.api.xla_model import real_devices as real_devices
from xla_core.api.xla_model import sync as sync
from xla_core.lowering.compile_settings import (
    set_custom_compile_options as set_custom_compile_options,
)
from xla_core.recording import random_state

__getattr__, __dir__ = lazy_names(__name__, {"launch": "xla_dist.processes.launching"})


def manual_seed(seed: int, device: torch.device | str | None = None) -> None:
    """Seed the random generator of ``device`` (default: those of all devices)."""
    if device is None:
        random_state.seed_all(seed)
    else:
        xla_model.set_rng_state(seed, device)
