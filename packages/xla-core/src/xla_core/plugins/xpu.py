"""Intel GPUs, by the PJRT library of Intel's extension for OpenXLA."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from xla_core.plugins.torch_xla_plugins import DevicePlugin
from xla_core.support import flags

PACKAGE: Final = "intel_extension_for_openxla"

MSG_NO_LIBRARY: Final = (
    "device XPU needs the package intel-extension-for-openxla, or {name} with the path of its "
    "PJRT library"
)


class XpuPlugin(DevicePlugin):
    """Intel GPUs; register it with ``register_plugin('XPU', XpuPlugin())``."""

    def library_path(self) -> str:
        """``XPU_LIBRARY_PATH``, or the path of the package's library. Raises RuntimeError without either."""
        path = flags.XPU_LIBRARY_PATH.text()
        if path:
            return path
        package = importlib.util.find_spec(PACKAGE)
        if package is None or not package.origin:
            raise RuntimeError(MSG_NO_LIBRARY.format(name=flags.XPU_LIBRARY_PATH.name))
        return str(Path(package.origin).parent / "pjrt_plugin_xpu.so")
