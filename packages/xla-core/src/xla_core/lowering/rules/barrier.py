"""The optimization barrier: the compiler moves and merges nothing across it."""

from __future__ import annotations

import torch
from jax import Array, lax

from xla_core.operators.lowering_registry import rule
from xla_core.torch_bridge import op_library as op_library


def _meta(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in tensors]


@rule(torch.ops.xla.optimization_barrier.default, meta=_meta)
def optimization_barrier(tensors: list[Array]) -> list[Array]:
    """The operands, which are all computed before any of the results is used."""
    return list(lax.optimization_barrier(tuple(tensors)))
