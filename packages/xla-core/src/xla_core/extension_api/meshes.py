"""DTensors on ``xla`` meshes: over processes as torch has them, and their random numbers."""

from __future__ import annotations

from xla_core.torch_features.dtensor_random import ShardedNumbers
from xla_core.torch_features.process_mesh import (
    distribute_module,
    distribute_tensor,
    is_over_processes,
)

__all__ = [
    "ShardedNumbers",
    "distribute_module",
    "distribute_tensor",
    "is_over_processes",
]
