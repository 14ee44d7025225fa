"""The CPU as an ``xla`` device: XLA's CPU compiler and runtime as they come in jaxlib."""

from __future__ import annotations

from xla_pjrt_cpu.client import CpuClient, create_client
from xla_pjrt_cpu.executable import CpuExecutable

__all__ = ["CpuClient", "CpuExecutable", "__version__", "create_client"]

__version__ = "0.1.0"
