"""TPUs as ``xla`` devices, through libtpu; its compiler also without a TPU (ahead of time)."""

from __future__ import annotations

from xla_pjrt_tpu.client import TpuClient, TpuTopologyClient, create_client

__all__ = ["TpuClient", "TpuTopologyClient", "__version__", "create_client"]

__version__ = "0.1.0"
