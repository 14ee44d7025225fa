"""How often values occur, by value or between the edges of bins.

NaN and what lies outside of the edges is counted nowhere; the last bin ends with its edge included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from xla_core.lowering.rules.common import count_as
from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.compaction import number
from xla_core.lowering.rules.indexing import searchsorted
from xla_core.operators.lowering_registry import aten, inspected_rule, rule

_BINNED = (torch.float32, torch.float64)


# bincount: its length is one more than the largest value, which is looked at first


def _length_meta(
    self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    if self.dtype in (torch.bool,) or self.is_floating_point() or self.is_complex():
        raise NotImplementedError(f"bincount of {self.dtype}")  # the CPU says it in its own words
    if self.numel() and self.dim() != 1:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is not None and self.numel() and weights.shape != self.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    return number(self)


def _bincount_meta(
    self: torch.Tensor,
    weights: torch.Tensor | None = None,
    minlength: int = 0,
    *,
    size: int,
) -> torch.Tensor:
    if weights is None or not self.numel():
        return self.new_empty(size, dtype=torch.int64)
    single = weights.dtype == torch.float32
    return self.new_empty(size, dtype=torch.float32 if single else torch.float64)


def bincount(self: Array, weights: Array | None = None, minlength: int = 0, *, size: int) -> Array:
    """The number, or the weight, of each value from 0 to ``size``."""
    if weights is None or not self.size:
        return jnp.zeros((size,), np.int64).at[self.reshape(-1)].add(1)
    dtype = np.float32 if weights.dtype == np.float32 else np.float64
    return jnp.zeros((size,), dtype).at[self].add(weights.astype(dtype))


@inspected_rule(aten.bincount.default, meta=_length_meta, then=bincount, then_meta=_bincount_meta)
def bincount_length(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    """The length of the result; -1 where a value is negative."""
    if not self.size:
        return jnp.asarray(minlength, np.int64)
    values = self.astype(np.int64)
    length = jnp.maximum(jnp.max(values) + 1, minlength)
    return select(jnp.min(values) < 0, -1, length)


# histograms, of vectors and of points in several dimensions


def _evenly(low: Array, high: Array, bins: int) -> Array:
    """The edges of equal bins, from either end as ``linspace`` has them."""
    step = (high - low) / count_as(bins, low.dtype)
    place = jnp.arange(bins + 1).astype(low.dtype)
    from_end = high - step * (count_as(bins, low.dtype) - place)
    return select(place < (bins + 1) // 2, low + step * place, from_end)


def _edges_of(column: Array, bins: int, bounds: Sequence[float] | None) -> Array:
    """The edges of ``bins`` bins over ``bounds``, else over the values of a coordinate."""
    if bounds is not None:
        low, high = (jnp.asarray(b, column.dtype) for b in bounds)
    elif column.size:
        low, high = jnp.min(column), jnp.max(column)
    else:
        low, high = jnp.zeros((), column.dtype), jnp.ones((), column.dtype)
    level = low == high
    half = count_as(1, column.dtype) / 2
    return _evenly(select(level, low - half, low), select(level, high + half, high), bins)


def _histogram(points: Array, edges: Sequence[Array], weight: Array | None, density: bool) -> Array:
    """Points ``[n, d]`` counted into the cells between ``edges``, one vector per coordinate."""
    shape = tuple(e.shape[0] - 1 for e in edges)
    inside = jnp.ones(points.shape[:1], np.bool_)
    cell = jnp.zeros(points.shape[:1], np.int32)
    for axis, edge in enumerate(edges):
        x = points[:, axis]
        place = searchsorted(edge, x, right=True).astype(np.int32) - 1
        place = jnp.minimum(place, shape[axis] - 1)  # the last edge belongs to the last bin
        inside &= (x >= edge[0]) & (x <= edge[-1])
        cell = cell * shape[axis] + place
    total = math.prod(shape)
    amount = jnp.ones(cell.shape, points.dtype) if weight is None else weight.reshape(-1)
    counts = jnp.zeros((total,), points.dtype)
    counts = counts.at[select(inside, cell, total)].add(amount, mode="drop").reshape(shape)
    if not density:
        return counts
    counts = counts / jnp.sum(counts)
    for axis, edge in enumerate(edges):
        width = (edge[1:] - edge[:-1]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        counts = counts / width
    return counts


def _is_wrong(edges: Sequence[Array]) -> Array:
    """Zero, or -1 where the values of a coordinate have no finite range."""
    finite = jnp.stack([jnp.all(jnp.isfinite(edge)) for edge in edges])
    return select(jnp.all(finite), jnp.zeros((), np.int64), -1)


def _check_binned(self: torch.Tensor) -> None:
    if self.dtype not in _BINNED:
        raise NotImplementedError(f"a histogram of {self.dtype}")


def _ranges(bounds: Sequence[float] | None, axes: int) -> list[Sequence[float] | None]:
    if bounds is None:
        return [None] * axes
    return [bounds[2 * axis : 2 * axis + 2] for axis in range(axes)]


def _bin_ct_meta(
    self: torch.Tensor, bins: int = 100, **_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_binned(self)
    return self.new_empty(max(bins, 0)), self.new_empty(max(bins, 0) + 1), number(self)


def _without_range(
    self: object, *_: object, range: Sequence[float] | None = None, **__: object
) -> bool:
    return range is None


@inspected_rule(aten.histogram.bin_ct, meta=_bin_ct_meta, looks=_without_range)
def histogram(
    self: Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array, Array]:
    """Counts of the elements in equal bins, and the bins' edges."""
    points = self.reshape(-1, 1)
    edge = _edges_of(points, bins, range)
    return _histogram(points, [edge], weight, density), edge, _is_wrong([edge])


def _bins_tensor_meta(
    self: torch.Tensor, bins: torch.Tensor, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_binned(self)
    return self.new_empty(max(bins.numel() - 1, 0)), torch.empty_like(bins)


@rule(aten.histogram.bins_tensor, meta=_bins_tensor_meta)
def histogram_of_edges(
    self: Array, bins: Array, *, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    """Counts of the elements between given edges, and the edges."""
    return _histogram(self.reshape(-1, 1), [bins], weight, density), bins


def _points(self: Array) -> Array:
    return self.reshape(math.prod(self.shape[:-1]), self.shape[-1])


def _all_edges(points: Array, bins: Sequence[int], bounds: Sequence[float] | None) -> list[Array]:
    ranges = _ranges(bounds, len(bins))
    return [_edges_of(points[:, a], count, ranges[a]) for a, count in enumerate(bins)]


def _bin_edges_meta(
    self: torch.Tensor, bins: Sequence[int], **_: object
) -> tuple[torch.Tensor, ...]:
    _check_binned(self)
    return (*[self.new_empty(count + 1) for count in bins], number(self))


@inspected_rule(aten._histogramdd_bin_edges.default, meta=_bin_edges_meta, looks=_without_range)
def histogramdd_bin_edges(
    self: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, ...]:
    """The edges of equal bins, of each coordinate."""
    edges = _all_edges(_points(self), bins, range)
    return (*edges, _is_wrong(edges))


def _from_bin_cts_meta(
    self: torch.Tensor, bins: Sequence[int], **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_binned(self)
    return self.new_empty(tuple(bins)), number(self)


@inspected_rule(
    aten._histogramdd_from_bin_cts.default, meta=_from_bin_cts_meta, looks=_without_range
)
def histogramdd_from_bin_cts(
    self: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    """Points counted into cells of equal size."""
    points = _points(self)
    edges = _all_edges(points, bins, range)
    return _histogram(points, edges, weight, density), _is_wrong(edges)


def _from_bin_tensors_meta(
    self: torch.Tensor, bins: Sequence[torch.Tensor], **_: object
) -> torch.Tensor:
    _check_binned(self)
    return self.new_empty([edge.numel() - 1 for edge in bins])


@rule(aten._histogramdd_from_bin_tensors.default, meta=_from_bin_tensors_meta)
def histogramdd_from_bin_tensors(
    self: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False
) -> Array:
    """Points counted into cells between given edges."""
    return _histogram(_points(self), bins, weight, density)
