"""For lowering rules: jax primitives and MLIR dialects, and jax functions as StableHLO."""

from __future__ import annotations

from xla_core.jax_bridge.jax_private import Primitive, ir, stablehlo
from xla_core.jax_bridge.jax_private import lower as lower_function

__all__ = [
    "Primitive",
    "ir",
    "lower_function",
    "stablehlo",
]
