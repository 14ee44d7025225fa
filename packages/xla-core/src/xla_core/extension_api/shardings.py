"""For lowering rules: values that are split over devices, and what happens to the parts."""

from __future__ import annotations

from xla_core.jax_bridge.sharding_primitives import (
    annotate_sharding,
    from_manual,
    reduce_parts,
    scatter_parts,
    shard_alike,
    to_manual,
)

__all__ = [
    "annotate_sharding",
    "from_manual",
    "reduce_parts",
    "scatter_parts",
    "shard_alike",
    "to_manual",
]
