"""Intel GPUs, by the PJRT library of Intel's extension for OpenXLA."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

from xla_core.plugins.torch_xla_plugins import DevicePlugin

LIBRARY: Final = "XPU_LIBRARY_PATH"
PACKAGE: Final = "intel_extension_for_openxla"

MSG_NO_LIBRARY: Final = (
    "device XPU needs the package intel-extension-for-openxla, or {name} with the path of its "
    "PJRT library"
)


class XpuPlugin(DevicePlugin):
    """Intel GPUs; register it with ``register_plugin('XPU', XpuPlugin())``."""

    def library_path(self) -> str:
        """``XPU_LIBRARY_PATH``, else the package's. Raises RuntimeError where neither is there."""
        named = os.environ.get(LIBRARY, "").strip()
        if named:
            return named
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.origin:
            raise RuntimeError(MSG_NO_LIBRARY.format(name=LIBRARY))
        return str(Path(found.origin).parent / "pjrt_plugin_xpu.so")
