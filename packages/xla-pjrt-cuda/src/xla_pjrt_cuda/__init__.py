"""NVIDIA GPUs as ``xla`` devices, through jax's CUDA plugin, whose compiler also works without a GPU."""

from __future__ import annotations

from xla_pjrt_cuda.client import CudaClient, CudaTopologyClient, create_client

__all__ = ["CudaClient", "CudaTopologyClient", "__version__", "create_client"]

__version__ = "0.1.0"
