"""The packages of this project, by the names under which they are imported."""

from __future__ import annotations

from typing import Final

__all__ = [
    "IMPORT_NAMES",
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
"""All that distributions are named after."""
IMPORT_NAMES: Final = (*PACKAGES, "torch_xla", "lazy_tensor_core", "_XLAC")
"""With those that xla-core brings for other names' sake: a frame of one of them is no line of the user's."""
