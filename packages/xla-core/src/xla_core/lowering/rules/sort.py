"""Sorting and the largest entries. NaN counts as the largest value, as in PyTorch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import is_float, is_nan
from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.views import wrap_dim
from xla_core.operators.lowering_registry import aten, rule


def sort_pairs(self: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """Values in order and their places; equal values keep theirs, also when descending."""
    if self.ndim == 0 or self.size == 0:
        return self, jnp.zeros(self.shape, np.int32)
    dim = wrap_dim(dim, self.ndim)
    keys = self.astype(np.uint8) if self.dtype == np.bool_ else self
    places = lax.broadcasted_iota(np.int32, self.shape, dim)
    if descending:
        # Sorting backwards and reading the result backwards keeps the order of equal values.
        keys, places = lax.rev(keys, (dim,)), lax.rev(places, (dim,))
    keys, places = lax.sort((keys, places), dimension=dim, is_stable=True, num_keys=1)
    if descending:
        keys, places = lax.rev(keys, (dim,)), lax.rev(places, (dim,))
    return keys.astype(self.dtype), places


@rule(aten.sort.default)
def sort(self: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Values in order and their places."""
    return sort_pairs(self, dim, descending)


@rule(aten.sort.stable)
def sort_stable(
    self: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    """The same; every sort here is stable."""
    return sort_pairs(self, dim, descending)


@rule(aten.topk.default)
def topk(
    self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    """The ``k`` largest or smallest entries along ``dim``, in order, and their places."""
    if self.ndim == 0:
        return self, jnp.zeros((), np.int32)
    dim = wrap_dim(dim, self.ndim)
    moved = jnp.moveaxis(self, dim, -1)
    keys = moved.astype(np.uint8) if moved.dtype == np.bool_ else moved
    if not largest:
        # ~x reverses the order of integers without the overflow of -x.
        keys = select(is_nan(keys), -jnp.inf, -keys) if is_float(keys.dtype) else ~keys
    _, places = lax.top_k(keys, k)
    values = jnp.take_along_axis(moved, places, -1, mode="promise_in_bounds")
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)
