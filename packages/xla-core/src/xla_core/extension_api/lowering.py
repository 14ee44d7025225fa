"""For lowering rules: jax primitives and MLIR dialects, jax functions as StableHLO, names of jax's types."""

from __future__ import annotations

from xla_core.jax_bridge.jax_private import Primitive, ir, stablehlo
from xla_core.jax_bridge.jax_private import lower as lower_function
from xla_core.jax_bridge.traced_values import JaxObject, Size, TracedValue

__all__ = [
    "JaxObject",
    "Primitive",
    "Size",
    "TracedValue",
    "ir",
    "lower_function",
    "stablehlo",
]
