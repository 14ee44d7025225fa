"""The functions of the ``torch_xla`` package itself."""

from __future__ import annotations

import torch

from xla_core import model_api, rng
from xla_core.compiled import compile as compile
from xla_core.compiled import step as step
from xla_core.model_api import device as device
from xla_core.model_api import device_count as device_count
from xla_core.model_api import devices as devices
from xla_core.model_api import real_devices as real_devices
from xla_core.model_api import sync as sync
from xla_core.settings import set_custom_compile_options as set_custom_compile_options


def manual_seed(seed: int, device: torch.device | str | None = None) -> None:
    """Seed the generator of one device (default: of all)."""
    if device is None:
        rng.seed_all(seed)
    else:
        model_api.set_rng_state(seed, device)
