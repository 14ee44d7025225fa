"""The functions of the ``torch_xla`` package itself."""

from __future__ import annotations

import torch

from xla_core import model_api
from xla_core.model_api import device as device
from xla_core.model_api import device_count as device_count
from xla_core.model_api import devices as devices
from xla_core.model_api import real_devices as real_devices
from xla_core.model_api import sync as sync


def manual_seed(seed: int, device: torch.device | str | None = None) -> None:
    """Seed the generator of one device (default: of all)."""
    for one in [device] if device is not None else model_api.devices():
        model_api.set_rng_state(seed, one)
