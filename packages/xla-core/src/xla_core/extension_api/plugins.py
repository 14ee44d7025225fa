"""Device plugins and extensions that are installed: finding, loading and starting them."""

from __future__ import annotations

from xla_core.operators.extensions import extensions
from xla_core.plugins.discovery import (
    PluginError,
    chosen_device,
    installed_devices,
    job_of,
    load_extensions,
    load_factory,
    new_manager,
    start_client,
)

__all__ = [
    "PluginError",
    "chosen_device",
    "extensions",
    "installed_devices",
    "job_of",
    "load_extensions",
    "load_factory",
    "new_manager",
    "start_client",
]
