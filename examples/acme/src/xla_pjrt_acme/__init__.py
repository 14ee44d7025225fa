"""The device plugin of a vendor called Acme: a template, ready to run on a CPU.

A vendor replaces the names, puts its PJRT library beside this file, and says which of jax's
platforms has the lowering rules that suit its compiler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xla_core.pjrt.client import PjrtClient
from xla_core.pjrt.library import CreateOptions, LibraryPlugin

__all__ = ["AcmeClient", "create_client"]

__version__ = "1.0.0"


def library(options: Mapping[str, str]) -> Path | None:
    """Acme's library: the one in this package, else the one that stands for it in this template."""
    del options
    bundled = Path(__file__).with_name("libacme.so")
    if bundled.is_file():
        return bundled
    try:
        spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("xla_cpu_pjrt.so")


def client_options(options: Mapping[str, str]) -> CreateOptions:
    """What the library's client is created with. Raises ValueError for a malformed number."""
    text = options.get("ACME_NUM_DEVICES", "1")
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"ACME_NUM_DEVICES is {text!r}; set it to a whole number of at least 1")
    return {"cpu_device_count": int(text)}


class AcmeClient(PjrtClient):
    """What is particular to the device; leave out what is as everywhere."""

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """The number format in which the device keeps ``dtype``."""
        return dtype


create_client = LibraryPlugin(
    "ACME",
    path=library,
    path_variable="ACME_LIBRARY_PATH",
    platform="cpu",
    plugin="xla-pjrt-acme",
    version=__version__,
    create_options=client_options,
    client_class=AcmeClient,
    install_hint='pip install "xla-pjrt-acme[library]"',
)
