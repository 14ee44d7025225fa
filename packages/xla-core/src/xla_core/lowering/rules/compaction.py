"""What is selected by values, moved to the front: ``nonzero`` and ``masked_select``.

Their results are as large as the operand, and what follows the selected elements means nothing: the
dispatcher fetches the count and cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import aten, inspected_rule


def number(like: torch.Tensor) -> torch.Tensor:
    """The meta of the number that the dispatcher looks at."""
    return like.new_empty((), dtype=torch.int64)


def ranks(kept: Array) -> Array:
    """For each element of a vector, how many come before it under ``kept``, itself excluded."""
    return lax.cumsum(kept.astype(np.int32)) - kept.astype(np.int32)


def to_front(kept: Array, *rows: Array) -> list[Array]:
    """Each of ``rows`` with the entries under ``kept`` first, in order; zeros follow them."""
    length = kept.shape[0]
    place = select(kept, ranks(kept), length)
    return [
        jnp.zeros_like(row).at[place].set(row, mode="drop", unique_indices=True) for row in rows
    ]


def _nonzero_meta(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices = self.new_empty((self.numel(), self.dim()), dtype=torch.int64)
    return indices, number(self)


@inspected_rule(aten.nonzero.default, meta=_nonzero_meta, dims=lambda *_: (0,))
def nonzero(self: Array) -> tuple[Array, Array]:
    """The indices of the elements that are not zero, a row each, and their number."""
    kept = (self != 0).reshape(-1)
    (flat,) = to_front(kept, lax.iota(np.int64, self.size))
    columns: Sequence[Array] = jnp.unravel_index(flat, self.shape) if self.size else ()
    if not columns:
        return jnp.zeros((self.size, self.ndim), np.int64), jnp.sum(kept)
    return jnp.stack(columns, -1), jnp.sum(kept)


def _masked_select_meta(
    self: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return self.new_empty(shape.numel()), number(self)


@inspected_rule(aten.masked_select.default, meta=_masked_select_meta, dims=lambda *_, **__: (0,))
def masked_select(self: Array, mask: Array) -> tuple[Array, Array]:
    """The elements under the mask, in order, and their number."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    kept = jnp.broadcast_to(mask, shape).reshape(-1)
    (values,) = to_front(kept, jnp.broadcast_to(self, shape).reshape(-1))
    return values, jnp.sum(kept)
