"""Adaptive pooling: windows that divide a dimension as evenly as whole numbers allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.symbolic_sizes import are_all, is_symbolic
from xla_core.jax_bridge.traced_values import Size, TracedValue
from xla_core.lowering.rules.common import count_as, opmath
from xla_core.lowering.rules.window import (
    Axis,
    along_axis,
    max_pool,
    max_pool_backward,
    max_scan,
    separable,
    spread,
    transposed,
)
from xla_core.operators.lowering_registry import aten, rule


def _edges(
    size: TracedValue, count: TracedValue, place: TracedValue
) -> tuple[TracedValue, TracedValue]:
    """Start and end of the windows at these places; neighbours overlap where the sizes do not divide."""
    return place * size // count, -(-(place + 1) * size // count)


def _average_matrix(size: Size, count: Size) -> TracedValue | None:
    """The part of each element in each window, ``[count, size]``: an array of jax where a size varies."""
    if is_symbolic(size) or is_symbolic(count):
        shape = (count, size)
        window, place = (lax.broadcasted_iota(np.int64, shape, axis) for axis in (0, 1))
        low, high = _edges(jnp.asarray(size, np.int64), jnp.asarray(count, np.int64), window)
        return ((place >= low) & (place < high)) / (high - low)
    if size == count:
        return None
    place = np.arange(size)
    low, high = _edges(size, count, np.arange(count)[:, None])
    return ((place >= low) & (place < high)) / (high - low)


def _matrices(shape: Sequence[int], counts: Sequence[int]) -> list[TracedValue | None]:
    sizes = shape[len(shape) - len(counts) :]
    return [_average_matrix(n, m) for n, m in zip(sizes, counts, strict=True)]


def _average(x: Array, counts: Sequence[int]) -> Array:
    rank = len(counts)
    if are_all(counts, 1):
        return jnp.mean(opmath(x), tuple(range(x.ndim - rank, x.ndim)), keepdims=True)
    return separable(opmath(x), _matrices(x.shape, counts))


def _average_backward(grad: Array, shape: Sequence[int], rank: int) -> Array:
    counts = grad.shape[grad.ndim - rank :]
    if are_all(counts, 1):
        inside = count_as(math.prod(shape[len(shape) - rank :]), opmath(grad).dtype)
        return jnp.broadcast_to(opmath(grad) / inside, tuple(shape))
    return separable(opmath(grad), transposed(_matrices(shape, counts)))


@rule(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(self: Array, output_size: int | Sequence[int]) -> Array:
    """Averages over an ``output_size`` grid of windows."""
    return _average(self, spread(output_size, 2))


@rule(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(self: Array, output_size: int | Sequence[int]) -> Array:
    """The same over three dimensions."""
    return _average(self, spread(output_size, 3))


@rule(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(grad_output: Array, self: Array) -> Array:
    """The gradient of ``_adaptive_avg_pool2d``."""
    return _average_backward(grad_output, self.shape, 2)


@rule(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(grad_output: Array, self: Array) -> Array:
    """The gradient of ``_adaptive_avg_pool3d``."""
    return _average_backward(grad_output, self.shape, 3)


def _even_axes(sizes: Sequence[int], counts: Sequence[int]) -> list[Axis] | None:
    """The windows as those of ordinary pooling, if the sizes divide."""
    if any(n == 0 or n % m for n, m in zip(sizes, counts, strict=True)):
        return None
    return [Axis(n, n // m, n // m, 0, 1, False) for n, m in zip(sizes, counts, strict=True)]


def _uneven_max(x: Array, sizes: Sequence[int], counts: Sequence[int]) -> tuple[Array, Array]:
    by_axis: list[Array] = []
    for offset in range(len(sizes)):
        axis, size = x.ndim - 1 - offset, sizes[-1 - offset]
        low, high = _edges(size, counts[-1 - offset], np.arange(counts[-1 - offset]))
        # Shorter windows repeat their last entry, which a strict comparison never takes.
        picks = [np.minimum(low + k, high - 1) for k in range(int((high - low).max()))]
        taps = [jnp.take(x, pick, axis) for pick in picks]
        carried = [[jnp.take(places, pick, axis) for pick in picks] for places in by_axis]
        x, place, kept = max_scan(taps, carried, np.zeros((1,) * x.ndim, np.int32))
        length = along_axis((high - low - 1).astype(np.int32), x.ndim, axis)
        start = along_axis(low.astype(np.int32), x.ndim, axis)
        by_axis = [jnp.minimum(place, length) + start, *kept]
    flat = by_axis[0]
    for size, places in zip(sizes[1:], by_axis[1:], strict=True):
        flat = flat * np.int32(size) + places
    return x, flat


def _max(x: Array, counts: Sequence[int]) -> tuple[Array, Array]:
    sizes = x.shape[x.ndim - len(counts) :]
    if x.size == 0 or 0 in counts:
        shape = (*x.shape[: x.ndim - len(counts)], *counts)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    axes = _even_axes(sizes, counts)
    return max_pool(x, axes) if axes is not None else _uneven_max(x, sizes, counts)


def _max_backward(grad: Array, x: Array, indices: Array, rank: int) -> Array:
    sizes, counts = x.shape[x.ndim - rank :], grad.shape[grad.ndim - rank :]
    axes = None if x.size == 0 or grad.size == 0 else _even_axes(sizes, counts)
    if axes is not None:
        return max_pool_backward(grad, indices.astype(np.int32), x.shape, axes)
    planes = int(np.prod(x.shape[: x.ndim - rank]))
    flat = jnp.zeros((planes, int(np.prod(sizes))), grad.dtype)
    place = indices.reshape(planes, int(np.prod(counts)))
    rows = np.arange(planes)[:, None]
    return flat.at[rows, place].add(grad.reshape(place.shape)).reshape(x.shape)


@rule(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(self: Array, output_size: int | Sequence[int]) -> tuple[Array, Array]:
    """Maxima over an ``output_size`` grid of windows, and where they are in their plane."""
    return _max(self, spread(output_size, 2))


@rule(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(self: Array, output_size: int | Sequence[int]) -> tuple[Array, Array]:
    """The same over three dimensions."""
    return _max(self, spread(output_size, 3))


@rule(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad_output: Array, self: Array, indices: Array) -> Array:
    """The gradient at the places that won."""
    return _max_backward(grad_output, self, indices, 2)


@rule(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad_output: Array, self: Array, indices: Array) -> Array:
    """The same over three dimensions."""
    return _max_backward(grad_output, self, indices, 3)
