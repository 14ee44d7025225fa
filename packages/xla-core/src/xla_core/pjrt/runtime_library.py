"""A PJRT library that a plugin loads by itself, where ``LibraryPlugin`` does not suit it."""

from __future__ import annotations

from xla_core.jax_bridge.jaxlib_runtime import JAXLIB_VERSION
from xla_core.jax_bridge.pjrt_c_api import (
    library_loaded,
    load_library,
    make_client,
    topology_devices,
)
from xla_core.plugins.torch_xla_plugins import DevicePlugin

__all__ = [
    "DevicePlugin",
    "JAXLIB_VERSION",
    "library_loaded",
    "load_library",
    "make_client",
    "topology_devices",
]
