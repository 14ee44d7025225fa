"""Checks what a GPU needs: jax's CUDA plugin, its kernels, and NVIDIA's driver.

Loads none of them. An error names the one that is missing or does not fit, and what to do next.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from xla_core.pjrt.gpu_runtime import JAXLIB_VERSION

MSG_NO_PLUGIN: Final = (
    "jax's CUDA plugin is not installed. Run: pip install 'xla-pjrt-cuda[cuda13]' (NVIDIA driver 580 or "
    "newer) or 'xla-pjrt-cuda[cuda12]' (525 or newer); either installs the plugin for jaxlib {jaxlib}"
)
MSG_VERSION: Final = (
    "{package} is {found}, but jaxlib is {jaxlib}: they must have the same version. Run: pip install "
    "'jax[cuda{cuda}]=={jaxlib}'"
)
MSG_NO_KERNELS: Final = (
    "{package}, which contains kernels that programs call (linear algebra, random numbers), is not "
    "installed. Run: pip install 'jax[cuda{cuda}]=={jaxlib}'"
)
MSG_NO_DRIVER: Final = (
    "NVIDIA's driver is not installed: there is no {nodes}. Install the driver (nvidia-smi must list a GPU); "
    "in a container, start it with --gpus all. On a machine without a GPU set XLA_AOT_TOPOLOGY (for "
    "example h100:1) to compile for one, or PJRT_DEVICE=CPU to compute"
)
MSG_OLD_DRIVER: Final = (
    "NVIDIA's driver is {found}, and CUDA {cuda} needs {oldest} or newer. Update the driver{other}"
)

OLDEST_DRIVER: Final[Mapping[int, int]] = {12: 525, 13: 580}
"""The oldest driver by CUDA's major version, from NVIDIA's table of minor version compatibility."""
# the second is that of Windows Subsystem for Linux
_NODES: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_DRIVER_VERSION: Final = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Plugin:
    """The installed CUDA plugin of jax: CUDA's major version, and the path of the library."""

    cuda: int
    library: Path

    @property
    def module(self) -> str:
        """The name of the module by which jax loads the plugin."""
        return f"xla_cuda{self.cuda}"

    @property
    def kernels(self) -> str:
        """The name of the module with the kernels that programs call by name."""
        return f"jax_cuda{self.cuda}_plugin"

    @property
    def packages(self) -> tuple[str, str]:
        """The names of the plugin's two distributions: the runtime, and the kernels."""
        return f"jax-cuda{self.cuda}-pjrt", f"jax-cuda{self.cuda}-plugin"


def find_plugin() -> Plugin | None:
    """The installed CUDA plugin of jax, for the newest CUDA if there are several; None without one.

    Imports nothing.
    """
    for cuda in sorted(OLDEST_DRIVER, reverse=True):
        try:
            spec = importlib.util.find_spec(f"jax_plugins.xla_cuda{cuda}")
        except ModuleNotFoundError:
            return None
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / "xla_cuda_plugin.so"
            if path.is_file():
                return Plugin(cuda, path)
    return None


def checked_plugin() -> Plugin:
    """The installed plugin. Raises RuntimeError if there is none, or if it does not fit jaxlib."""
    plugin = find_plugin()
    if plugin is None:
        raise RuntimeError(MSG_NO_PLUGIN.format(jaxlib=JAXLIB_VERSION))
    for package in plugin.packages:
        version = _version(package)
        names = {
            "package": package,
            "found": version,
            "cuda": plugin.cuda,
            "jaxlib": JAXLIB_VERSION,
        }
        if version is None:
            raise RuntimeError(MSG_NO_KERNELS.format(**names))
        if _release(version) != _release(JAXLIB_VERSION):
            raise RuntimeError(MSG_VERSION.format(**names))
    return plugin


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded on this machine; opens no device."""
    return any(node.exists() for node in _NODES)


def driver_version() -> str | None:
    """The driver's version, from its kernel module; None if that is unknown."""
    try:
        text = _DRIVER_VERSION.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def check_driver(cuda: int) -> None:
    """Raise RuntimeError if NVIDIA's driver is missing, or too old for CUDA ``cuda``."""
    if not has_driver():
        raise RuntimeError(MSG_NO_DRIVER.format(nodes=" and no ".join(map(str, _NODES))))
    driver, oldest = driver_version(), OLDEST_DRIVER[cuda]
    if driver is None or int(driver.split(".")[0]) >= oldest:
        return
    older = [n for n, wanted in OLDEST_DRIVER.items() if wanted <= int(driver.split(".")[0])]
    other = f", or run: pip install 'xla-pjrt-cuda[cuda{max(older)}]'" if older else ""
    raise RuntimeError(MSG_OLD_DRIVER.format(found=driver, cuda=cuda, oldest=oldest, other=other))


def visible_gpus(options: Mapping[str, str]) -> list[str]:
    """The names of this process's GPUs: those in ``CUDA_VISIBLE_DEVICES``, or all of the machine.

    Does not query the driver.
    """
    visible = options.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    nodes = [node.name for node in Path("/dev").glob("nvidia[0-9]*")]
    return [str(number) for number in sorted(int(name.removeprefix("nvidia")) for name in nodes)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """``0.10.2`` of ``0.10.2.dev1+cuda``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else version
