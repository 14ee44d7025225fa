"""The packages of this project, by the names under which they are imported."""

from __future__ import annotations

from typing import Final

__all__ = [
    "PACKAGES",
]

PACKAGES: Final = (
    "xla_core",
    "xla_pjrt_cpu",
    "xla_pjrt_tpu",
    "xla_pjrt_cuda",
    "xla_dist",
    "xla_spmd",
    "xla_debug",
    "xla_plan",
)
"""All but ``torch_xla``, which the package xla-core brings."""
