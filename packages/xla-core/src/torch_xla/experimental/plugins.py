"""torch_xla.experimental.plugins: registers device plugins."""

from __future__ import annotations

from xla_core.plugins.torch_xla_plugins import DevicePlugin as DevicePlugin
from xla_core.plugins.torch_xla_plugins import default as default
from xla_core.plugins.torch_xla_plugins import (
    register_installed_plugins as register_installed_plugins,
)
from xla_core.plugins.torch_xla_plugins import register_plugin as register_plugin

use_dynamic_plugins = register_installed_plugins


def using_dynamic_plugins() -> bool:
    """True: every device comes from a plugin."""
    return True
