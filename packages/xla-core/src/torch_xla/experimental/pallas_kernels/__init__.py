"""torch_xla.experimental.pallas_kernels: torch_xla's kernels as functions on jax arrays."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
