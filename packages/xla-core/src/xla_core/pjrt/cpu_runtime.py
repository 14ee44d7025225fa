"""XLA's own CPU client, and how much work its programs are: for a plugin of the CPU."""

from __future__ import annotations

from xla_core.jax_bridge.jaxlib_runtime import (
    EXTRA_OPTIONS,
    Device,
    make_cpu_client,
    prepare_cpu_kernels,
)
from xla_core.jax_bridge.program_work import Weights, estimate
from xla_core.pjrt.compile_options import Options, with_known_options

__all__ = [
    "Device",
    "EXTRA_OPTIONS",
    "Options",
    "Weights",
    "estimate",
    "make_cpu_client",
    "prepare_cpu_kernels",
    "with_known_options",
]
