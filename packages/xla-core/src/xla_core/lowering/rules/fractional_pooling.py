"""Maximum pooling over windows at random places (Graham 2014, fractional max-pooling)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from xla_core.lowering.rules.common import opmath
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import aten, rule


def _planes(a: Array, rank: int) -> Array:
    """``a`` with the last ``rank`` dimensions as one, and everything before as another."""
    count = int(np.prod(a.shape[: a.ndim - rank], dtype=np.int64))
    return a.reshape(count, int(np.prod(a.shape[a.ndim - rank :], dtype=np.int64)))


def _starts(sample: Array, size: int, count: int, kernel: int) -> Array:
    """The first entry of each window along one dimension, ``[..., count]``."""
    if count == 1:
        return jnp.full((*sample.shape, 1), size - kernel, np.int32)
    alpha = np.asarray((size - kernel) / (count - 1), sample.dtype)
    steps = jnp.arange(count - 1, dtype=sample.dtype)
    offset = (sample * alpha).astype(np.int32)
    inner = ((steps + sample[..., None]) * alpha).astype(np.int32) - offset[..., None]
    last = jnp.full((*sample.shape, 1), size - kernel, np.int32)
    return jnp.concatenate([inner, last], -1)


def _fractional(
    x: Array, kernel: Sequence[int], output: Sequence[int], order: Sequence[int], samples: Array
) -> tuple[Array, Array]:
    """Maxima and flat places; ``order`` says which random number belongs to which dimension."""
    rank = len(kernel)
    sizes = x.shape[x.ndim - rank :]
    if x.size == 0:
        shape = (*x.shape[: x.ndim - rank], *output)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    planes = opmath(x).reshape(-1, *sizes)
    # An unbatched input takes the numbers of the first image, however many there are.
    drawn = samples.reshape(-1, rank)[: planes.shape[0]].astype(planes.dtype)
    flat: Array = jnp.zeros((planes.shape[0], *[1] * 2 * rank), np.int32)
    for axis, (size, window, count) in enumerate(zip(sizes, kernel, output, strict=True)):
        first = _starts(drawn[:, order[axis]], size, count, window)
        place = first[:, :, None] + jnp.arange(window, dtype=np.int32)
        spread = [1] * 2 * rank
        spread[axis], spread[rank + axis] = count, window
        flat = flat * np.int32(size) + place.reshape(-1, *spread)
    flat = flat.reshape(planes.shape[0], int(np.prod(output)), int(np.prod(kernel)))
    values = planes.reshape(planes.shape[0], -1)
    seen = jnp.take_along_axis(values, flat.reshape(planes.shape[0], -1), 1).reshape(flat.shape)
    # As in PyTorch's kernel the first maximum wins, but the last NaN.
    nans = jnp.isnan(seen)
    last = seen.shape[2] - 1 - jnp.argmax(nans[:, :, ::-1], 2)
    best = select(jnp.any(nans, 2), last, jnp.argmax(seen, 2))[:, :, None]
    shape = (*x.shape[: x.ndim - rank], *output)
    places = jnp.take_along_axis(flat, best, 2).reshape(shape)
    return jnp.take_along_axis(seen, best, 2).reshape(shape), places


@rule(aten.fractional_max_pool2d.default)
def fractional_max_pool2d(
    self: Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Array
) -> tuple[Array, Array]:
    """Maxima over windows at random places, and where they are in their plane."""
    return _fractional(self, kernel_size, output_size, (1, 0), random_samples)


@rule(aten.fractional_max_pool3d.default)
def fractional_max_pool3d(
    self: Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Array
) -> tuple[Array, Array]:
    """The same in three dimensions."""
    return _fractional(self, kernel_size, output_size, (0, 1, 2), random_samples)


def _like_input(grad_output: torch.Tensor, self: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(self)


@rule(
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    meta=_like_input,
)
def fractional_max_pool_backward(
    grad_output: Array,
    self: Array,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: Array,
) -> Array:
    """Gradients added up at the places that won."""
    rank = len(output_size)
    grad, places = _planes(opmath(grad_output), rank), _planes(indices, rank)
    like = _planes(self, rank)
    rows = jnp.arange(like.shape[0])[:, None]
    return jnp.zeros(like.shape, grad.dtype).at[rows, places].add(grad).reshape(self.shape)
