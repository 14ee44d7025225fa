"""The CPU as an ``xla`` device: XLA's CPU compiler and runtime as they come in jaxlib."""

from __future__ import annotations

from xla_pjrt_cpu.client import CpuClient, create_client

__all__ = ["CpuClient", "__version__", "create_client"]

__version__ = "0.1.0"
