"""Embedding look-ups and their gradients, plain and in bags.

Indices outside the table follow XLA (clamped when read, dropped when written), where PyTorch on
the CPU raises. Gradients are scatter-adds: on XLA:CPU a product with a one-hot matrix takes 4 to
150 times as long (65 to 50,257 rows of 64 or 128 numbers, 512 indices).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from xla_core.lowering.rules.common import opmath, output_shape
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import RuleContext, aten, rule

_SUM, _MEAN, _MAX = range(3)


def take_rows(table: Array, index: Array) -> Array:
    """Rows of ``table``; an index is never negative here, and XLA clamps one that is too large."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def add_rows(count: int, index: Array, rows: Array) -> Array:
    """A table of ``count`` rows that sums ``rows`` by ``index``; others are dropped."""
    table = jnp.zeros((count, *rows.shape[index.ndim :]), rows.dtype)
    return table.at[index].add(rows, mode="drop", wrap_negative_indices=False)


def _same_table(self: torch.Tensor, *_settings: object) -> torch.Tensor:
    return torch.empty_like(self)


@rule(aten.embedding_renorm.default, meta=_same_table)
def embedding_renorm(self: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """The rows that ``indices`` name scaled down to a norm of at most ``max_norm``."""
    wide = opmath(self)
    norms = jnp.linalg.norm(wide, ord=norm_type, axis=1, keepdims=True)
    # PyTorch's kernel keeps the same distance from a division by zero.
    scale = select(norms > max_norm, max_norm / (norms + 1e-7), 1)
    named = jnp.zeros((self.shape[0], 1), bool).at[indices.reshape(-1)].set(True)
    return select(named, wide * scale, wide)


@rule(aten.embedding.default)
def embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """The rows of ``weight`` at ``indices``; the other arguments matter to the gradient only."""
    return take_rows(weight, indices)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: Array,
    indices: Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Array:
    """The gradient of the whole table; row ``padding_idx``, unless negative, gets none."""
    if padding_idx >= 0:
        indices = select(indices == padding_idx, num_weights, indices)
    rows = opmath(grad_output)
    if scale_grad_by_freq:
        counts = _counts(num_weights, indices)
        rows = rows / take_rows(counts, indices).astype(rows.dtype)[..., None]
    return add_rows(num_weights, indices, rows).astype(grad_output.dtype)


def _counts(size: int, indices: Array) -> Array:
    return add_rows(size, indices, jnp.ones(indices.shape, np.int32))


def _bags(indices: Array, offsets: Array, include_last_offset: bool) -> tuple[Array, int]:
    """The bag of each index, and how many bags there are."""
    count = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    starts = _counts(indices.shape[0], offsets[:count])
    return jnp.cumsum(starts, dtype=np.int64) - 1, count


def _bag_max(
    rows: Array, indices: Array, bags: Array, valid: Array, count: int
) -> tuple[Array, Array]:
    """Maximum over each bag, and the table row it came from; zeros for an empty bag."""
    low = jnp.asarray(-jnp.inf, rows.dtype)
    rows = select(valid[:, None], rows, low)
    start = jnp.full((count, rows.shape[1]), low)
    best = start.at[bags].max(rows, mode="drop")
    size = rows.shape[0]
    place = jnp.arange(size)[:, None]
    hit = select((rows == take_rows(best, bags)) & valid[:, None], place, size)
    first = jnp.full(best.shape, size, hit.dtype).at[bags].min(hit, mode="drop")
    exists = first < size
    source = select(exists, take_rows(indices, jnp.minimum(first, max(size - 1, 0))), 0)
    return select(exists, best, 0), source


@rule(
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    context=True,
)
def embedding_bag(
    context: RuleContext,
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, ...]:
    """Sum, mean or maximum of each bag's rows; also the bag of each index, bag sizes and maxima."""
    bags, count = _bags(indices, offsets, include_last_offset)
    valid = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    sizes = jnp.zeros(count, indices.dtype).at[bags].add(valid.astype(indices.dtype))
    rows = opmath(take_rows(weight, indices)) if indices.shape[0] else None
    maxima = jnp.zeros(output_shape(context, 3), indices.dtype)
    if rows is None:
        total = jnp.zeros(output_shape(context, 0), weight.dtype)
    elif mode == _MAX:
        total, maxima = _bag_max(rows, indices, bags, valid, count)
    else:
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[:, None].astype(rows.dtype)
        total = add_rows(count, bags, select(valid[:, None], rows, 0))
        if mode == _MEAN:
            total = total / jnp.maximum(sizes, 1)[:, None].astype(total.dtype)
    return total, _fit(bags, context, 1), _fit(sizes, context, 2), _fit(maxima, context, 3)


def _fit(value: Array, context: RuleContext, index: int) -> Array:
    """``value`` in the promised shape: with a last offset PyTorch counts one bag more."""
    shape = output_shape(context, index)
    if value.shape == shape or value.ndim != len(shape):
        return jnp.broadcast_to(value, shape)
    return jnp.pad(value, [(0, max(n - m, 0)) for m, n in zip(value.shape, shape, strict=True)])[
        tuple(slice(0, n) for n in shape)
    ]


@rule(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """The gradient of the table of ``_embedding_bag``."""
    wide = opmath(grad)
    if mode == _MAX:
        used = select(bag_size[: grad.shape[0], None] > 0, maximum_indices, num_weights)
        columns = jnp.arange(grad.shape[1])[None]
        table = jnp.zeros((num_weights, grad.shape[1]), wide.dtype)
        return table.at[used, columns].add(wide, mode="drop").astype(grad.dtype)
    if mode == _MEAN:
        sizes = jnp.maximum(bag_size[: grad.shape[0]], 1).astype(wide.dtype)
        wide = wide / sizes[:, None]
    rows = take_rows(wide, offset2bag)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None].astype(rows.dtype)
    return embedding_dense_backward(
        rows, indices, num_weights, padding_idx, scale_grad_by_freq
    ).astype(grad.dtype)


@rule(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """The gradient of the table, dense also where a sparse one was asked for."""
    return embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    grad: Array,
    weight: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    mode: int,
    padding_idx: int = -1,
) -> Array:
    """The gradient of ``per_sample_weights``: the gradient's bag row times the table's row."""
    products = opmath(take_rows(grad, offset2bag)) * opmath(take_rows(weight, indices))
    total = jnp.sum(products, axis=1)
    return select(indices == padding_idx, 0, total) if padding_idx >= 0 else total
