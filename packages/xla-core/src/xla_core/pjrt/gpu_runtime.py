"""A GPU's PJRT library that jax has a plugin for: with its kernels, and its compiler without a GPU."""

from __future__ import annotations

from xla_core.jax_bridge.jaxlib_runtime import JAXLIB_VERSION
from xla_core.jax_bridge.pjrt_c_api import (
    check_cuda_libraries,
    initialize_library,
    library_loaded,
    load_gpu_compiler,
    load_jax_plugins,
    make_client,
    topology_devices,
)

__all__ = [
    "JAXLIB_VERSION",
    "check_cuda_libraries",
    "initialize_library",
    "library_loaded",
    "load_gpu_compiler",
    "load_jax_plugins",
    "make_client",
    "topology_devices",
]
