"""NVIDIA GPUs as ``xla`` devices (``PJRT_DEVICE=CUDA``), through jax's CUDA plugin.

``pip install "jax[cuda12]"`` (or ``cuda13``) brings the runtime; jax finds it, loads NVIDIA's libraries and
registers the kernels that compiled programs call. The client is our own: a jax in the same process
has another, and both reserve memory as ``XLA_PYTHON_CLIENT_PREALLOCATE`` and
``XLA_CLIENT_MEM_FRACTION`` say.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from xla_core.jax_bridge import jax_private, pjrt_c_api
from xla_core.pjrt.client import PjrtClient
from xla_core.pjrt.library import LibraryPlugin

__all__ = [
    "CudaClient",
    "CudaPlugin",
    "create_client",
    "plugin_library",
]

_PLUGINS: Final = ("xla_cuda13", "xla_cuda12")
_DRIVER: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))

MSG_NO_RUNTIME: Final = (
    'CUDA: jax\'s CUDA plugin {state}. Run: pip install "jax[cuda12]=={version}", and see that '
    "nvidia-smi lists a GPU"
)


class CudaClient(PjrtClient):
    """The GPUs that this process may use."""

    def fingerprint(self) -> Mapping[str, str]:
        """Versions of plugin, jaxlib and CUDA, and the kinds of the GPUs."""
        kinds = sorted({(d.kind, str(d.attributes)) for d in self._descriptions})
        return {**super().fingerprint(), "kinds": repr(kinds)}


def plugin_library(options: Mapping[str, str]) -> Path | None:
    """The shared library of the installed CUDA plugin of jax; None without one. Imports nothing."""
    del options
    for name in _PLUGINS:
        try:
            spec = importlib.util.find_spec(f"jax_plugins.{name}")
        except ModuleNotFoundError:
            return None
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / "xla_cuda_plugin.so"
            if path.is_file():
                return path
    return None


class CudaPlugin(LibraryPlugin):
    """As ``LibraryPlugin``, but jax loads the library, with all that belongs to it."""

    def is_available(self, options: Mapping[str, str]) -> bool:
        """Whether the plugin is installed and NVIDIA's driver is there; loads nothing."""
        return self.find(options) is not None and any(node.exists() for node in _DRIVER)

    def load(self, options: Mapping[str, str]) -> str:
        """Let jax load the library. Raises RuntimeError when there is none, or none that works."""
        name = "cuda"
        installed = self.find(options) is not None
        if installed:
            pjrt_c_api.load_jax_plugins()
        if not pjrt_c_api.library_loaded(name):
            state = "is installed but could not be loaded (see the log)"
            raise RuntimeError(
                MSG_NO_RUNTIME.format(
                    state=state if installed else "is not installed",
                    version=jax_private.JAXLIB_VERSION,
                )
            )
        pjrt_c_api.initialize_library(name)
        return name


create_client: Final = CudaPlugin(
    "CUDA",
    path=plugin_library,
    platform="cuda",
    plugin="xla-core cuda",
    create_options=lambda _options: pjrt_c_api.gpu_options(),
    client_class=CudaClient,
)
