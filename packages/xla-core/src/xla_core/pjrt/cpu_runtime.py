"""XLA's own CPU client, its programs' modules, and how much work they are: for a plugin of the CPU."""

from __future__ import annotations

from xla_core.jax_bridge.jaxlib_runtime import (
    EXTRA_OPTIONS,
    Device,
    make_cpu_client,
    prepare_cpu_kernels,
)
from xla_core.jax_bridge.mlir_contexts import Module, parsed
from xla_core.jax_bridge.program_work import Weights, estimate
from xla_core.pjrt.compile_options import Options, with_known_options

__all__ = [
    "Device",
    "EXTRA_OPTIONS",
    "Module",
    "Options",
    "Weights",
    "estimate",
    "make_cpu_client",
    "parsed",
    "prepare_cpu_kernels",
    "with_known_options",
]
