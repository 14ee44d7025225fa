"""XLA's own CPU client, and how much work its programs are: for a plugin of the CPU."""

from __future__ import annotations

from xla_core.jax_bridge.jax_private import (
    EXTRA_OPTIONS,
    Device,
    make_cpu_client,
    prepare_cpu_kernels,
)
from xla_core.jax_bridge.pjrt_c_api import unknown_option
from xla_core.jax_bridge.program_work import Weights, estimate

__all__ = [
    "Device",
    "EXTRA_OPTIONS",
    "Weights",
    "estimate",
    "make_cpu_client",
    "prepare_cpu_kernels",
    "unknown_option",
]
