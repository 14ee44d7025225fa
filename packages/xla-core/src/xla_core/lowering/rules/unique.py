"""Distinct elements and distinct rows, from a sort; of neighbours without one.

NaN differs from NaN, as on the CPU. Results have room for as many as there are elements: the dispatcher
fetches the number of distinct ones and cuts them.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.compaction import number, to_front
from xla_core.operators.lowering_registry import aten, inspected_rule

MSG_NO_DIMENSIONS = "Dimension specified as {dim} but tensor has no dimensions"


def _indices(self: torch.Tensor, *shape: int) -> torch.Tensor:
    return self.new_empty(shape, dtype=torch.int64)


def _refuse_complex(self: torch.Tensor) -> None:
    if self.is_complex():
        raise NotImplementedError(f"unique of {self.dtype}")  # the CPU says it in its own words


def _flat_meta(self: torch.Tensor, inverse: bool, counts: bool) -> tuple[torch.Tensor, ...]:
    _refuse_complex(self)
    return (
        self.new_empty(self.numel()),
        _indices(self, *self.shape) if inverse else _indices(self, 0),
        _indices(self, self.numel()) if counts else _indices(self, 0),
        number(self),
    )


def _unique2_meta(
    self: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    return _flat_meta(self, return_inverse, return_counts)


def _unique_meta(
    self: torch.Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[torch.Tensor, ...]:
    values, inverse, _, total = _flat_meta(self, return_inverse, False)
    return values, inverse, total


def _firsts(rows: Array) -> Array:
    """Where a row differs from the one before it; the first one always does."""
    if rows.shape[0] == 0:
        return jnp.zeros((0,), np.bool_)
    differs = rows[1:] != rows[:-1]
    if rows.ndim > 1:
        differs = jnp.any(differs, -1)
    return jnp.concatenate([jnp.ones((1,), np.bool_), differs])


def _grouped(rows: Array, order: Array | None) -> tuple[Array, Array, Array, Array]:
    """The first row of each run, which run a row is in, how long runs are, and how many there are.

    ``order`` says where each row stood before the rows were sorted.
    """
    first = _firsts(rows)
    run = lax.cumsum(first.astype(np.int32)) - 1
    (distinct,) = to_front(first, rows)
    inverse = run if order is None else jnp.zeros_like(run).at[order].set(run, unique_indices=True)
    counts = jnp.zeros(rows.shape[:1], np.int32).at[run].add(1)
    return distinct, inverse, counts, jnp.sum(first)


def _keys(values: Array) -> Array:
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


@inspected_rule(aten._unique2.default, meta=_unique2_meta, dims=lambda *_, **__: (0, None, 0))
def unique2(
    self: Array, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Array, ...]:
    """Distinct elements in ascending order, where each element is among them, how often each occurs."""
    places = lax.iota(np.int32, self.size)
    keys, order = lax.sort((_keys(self.reshape(-1)), places), num_keys=1, is_stable=True)
    distinct, inverse, counts, total = _grouped(keys, order)
    empty = jnp.zeros((0,), np.int64)
    inverse = inverse.reshape(self.shape) if return_inverse else empty
    return distinct.astype(self.dtype), inverse, counts if return_counts else empty, total


@inspected_rule(aten._unique.default, meta=_unique_meta, dims=lambda *_, **__: (0, None))
def unique(
    self: Array, sorted: bool = True, return_inverse: bool = False
) -> tuple[Array, Array, Array]:
    """The same without counts."""
    distinct, inverse, _, total = unique2(self, sorted, return_inverse)
    return distinct, inverse, total


# Along a dimension: its entries are rows of one table.


def _rows_meta(self: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    _refuse_complex(self)
    if self.dim() == 0:
        raise IndexError(MSG_NO_DIMENSIONS.format(dim=dim))
    count = self.shape[dim]
    if 0 in self.shape and (count != 0 or self.shape.count(0) > 1):
        raise RuntimeError("There are 0 sized dimensions, so unique cannot be applied")
    return (
        torch.empty_like(self),
        _indices(self, count),
        _indices(self, count),
        number(self),
    )


def _unique_dim_meta(
    self: torch.Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    return _rows_meta(self, dim)


def _consecutive_dim_meta(
    self: torch.Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, ...]:
    return _rows_meta(self, dim)


def _is_flat(dimensions: int, dim: int | None) -> bool:
    # PyTorch takes dimension 0 of a vector for no dimension at all
    return dim is None or (dim == 0 and dimensions == 1)


def _consecutive_meta(
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, ...]:
    if _is_flat(self.dim(), dim):
        return _flat_meta(self, return_inverse, return_counts)
    assert dim is not None
    return _rows_meta(self, dim)


def _row_order(rows: Array) -> Array:
    """The stable order of rows that compares their first columns, then their second, and so on."""
    count, width = rows.shape

    def by_column(step: Array, order: Array) -> Array:
        # from the last column to the first one: each sort keeps the order of those before it
        column = lax.dynamic_index_in_dim(rows, width - 1 - step, 1, keepdims=False)[order]
        return lax.sort((column, order), num_keys=1, is_stable=True)[1]

    return lax.fori_loop(0, width, by_column, lax.iota(np.int32, count))


def _along(self: Array, dim: int, sort: bool) -> tuple[Array, ...]:
    moved = jnp.moveaxis(self, dim, 0)
    rows = moved.reshape(moved.shape[0], math.prod(moved.shape[1:]))
    order = None
    if sort and rows.size:
        order = _row_order(_keys(rows))
        rows = rows[order]
    distinct, inverse, counts, total = _grouped(rows, order)
    return jnp.moveaxis(distinct.reshape(moved.shape), 0, dim), inverse, counts, total


@inspected_rule(
    aten.unique_dim.default,
    meta=_unique_dim_meta,
    dims=lambda self, dim, *_, **__: (dim, None, 0),
)
def unique_dim(
    self: Array,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Array, ...]:
    """Distinct entries along ``dim`` in lexicographic order, with inverse and counts."""
    return _along(self, dim, True)


@inspected_rule(
    aten.unique_dim_consecutive.default,
    meta=_consecutive_dim_meta,
    dims=lambda self, dim, *_, **__: (dim, None, 0),
)
def unique_dim_consecutive(
    self: Array, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Array, ...]:
    """The first of each run of equal entries along ``dim``, with inverse and counts."""
    return _along(self, dim, False)


def _consecutive_dims(
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[int | None, ...]:
    return (dim or 0, None, 0)


@inspected_rule(aten.unique_consecutive.default, meta=_consecutive_meta, dims=_consecutive_dims)
def unique_consecutive(
    self: Array, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Array, ...]:
    """The first of each run of equal elements, or of equal entries along ``dim``."""
    if not _is_flat(self.ndim, dim):
        assert dim is not None
        return _along(self, dim, False)
    distinct, inverse, counts, total = _grouped(self.reshape(-1), None)
    empty = jnp.zeros((0,), np.int64)
    inverse = inverse.reshape(self.shape) if return_inverse else empty
    return distinct, inverse, counts if return_counts else empty, total
