"""Sampling an image at the points of a grid, and the grids that affine maps make.

The gradients are jax's transposes of the same gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering.rules.common import opmath
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import rule

aten = torch.ops.aten

# PyTorch's numbers for interpolation and padding modes.
_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)

# The parameter of PyTorch's cubic kernel.
_CUBIC_A = -0.75

# The entries that one dimension contributes to each point, and their weights, the entries first.
_Taps = tuple[Array, Array]


def _reflect(x: Array, low: float, high: float) -> Array:
    """``x`` folded back and forth between the bounds."""
    span = high - low
    if span == 0:
        return jnp.zeros_like(x)
    distance = jnp.abs(x - low)
    rest, flips = jnp.mod(distance, span), jnp.floor(distance / span)
    return select(jnp.mod(flips, 2) == 0, rest + low, high - rest)


def _bounded(x: Array, size: int, padding: int, align_corners: bool) -> Array:
    """Places outside the image moved into it, unless zeros stand there."""
    if padding == _REFLECTION:
        edge = 0.0 if align_corners else 0.5
        x = _reflect(x, -edge, size - 1 + edge)
    return x if padding == _ZEROS else jnp.clip(x, 0, size - 1)


def _places(grid: Array, sizes: Sequence[int], align_corners: bool) -> list[Array]:
    """The grid's coordinates (-1 to 1, last dimension first) as places in the image."""
    places = []
    for axis, size in enumerate(sizes):
        x = grid[..., len(sizes) - 1 - axis]
        places.append((x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2)
    return places


def _read(image: Array, places: Sequence[Array]) -> Array:
    """The image at whole places, zero outside: ``[N, C, *points]``."""
    sizes, batch = image.shape[2:], image.shape[0]
    inside: TracedValue = True
    flat: TracedValue = 0
    for x, size in zip(places, sizes, strict=True):
        inside = inside & (x >= 0) & (x <= size - 1)
        flat = flat * size + jnp.clip(x, 0, size - 1).astype(np.int32)
    rows = image.reshape(batch, image.shape[1], math.prod(sizes))
    points = flat.reshape(batch, -1)
    values = jax.vmap(lambda row, at: row.at[:, at].get(mode="promise_in_bounds"))(rows, points)
    return select(inside[:, None], values.reshape(*image.shape[:2], *flat.shape[1:]), 0)


def _linear_taps(x: Array) -> _Taps:
    low = jnp.floor(x)
    return jnp.stack([low, low + 1]), jnp.stack([low + 1 - x, x - low])


def _cubic_taps(x: Array, size: int, padding: int, align_corners: bool) -> _Taps:
    low = jnp.floor(x)
    step = jnp.arange(-1, 3, dtype=x.dtype).reshape(-1, *(1,) * x.ndim)
    distance = jnp.abs(x - low - step)
    near = ((_CUBIC_A + 2) * distance - (_CUBIC_A + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * _CUBIC_A - 4 * _CUBIC_A
    places = _bounded(low + step, size, padding, align_corners)
    return places, select((step == 0) | (step == 1), near, far)


def _corners(taps: Sequence[_Taps]) -> tuple[list[Array], Array]:
    """Every combination of the dimensions' entries, on one axis behind the batch.

    One gather for all of them keeps the program small: 16 for cubic interpolation compile slowly.
    """
    rank, points = len(taps), taps[0][0].shape[1:]
    grid = tuple(entries.shape[0] for entries, _ in taps)

    def spread(value: Array, axis: int) -> Array:
        shape = [grid[axis] if a == axis else 1 for a in range(rank)]
        full = jnp.broadcast_to(value.reshape(*shape, *points), (*grid, *points))
        return jnp.moveaxis(full.reshape(math.prod(grid), *points), 0, 1)

    weight = math.prod(spread(part, axis) for axis, (_, part) in enumerate(taps))
    return [spread(entries, axis) for axis, (entries, _) in enumerate(taps)], weight


def _sample(image: Array, grid: Array, mode: int, padding: int, align_corners: bool) -> Array:
    sizes = image.shape[2:]
    places = _places(grid, sizes, align_corners)
    if mode == _BICUBIC:
        pairs = zip(places, sizes, strict=True)
        taps = [_cubic_taps(x, size, padding, align_corners) for x, size in pairs]
    else:
        pairs = zip(places, sizes, strict=True)
        places = [_bounded(x, size, padding, align_corners) for x, size in pairs]
        if mode == _NEAREST:
            return _read(image, [jnp.round(x) for x in places])
        taps = [_linear_taps(x) for x in places]
    entries, weight = _corners(taps)
    # What rounding to an entry does to the gradient is nothing: it flows through the weights.
    values = _read(image, [lax.stop_gradient(x) for x in entries])
    return jnp.sum(values * weight[:, None], 2)


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """``input`` (``[N, C, *image]``) at the points of ``grid`` (``[N, *points, dims]``)."""
    settings = (interpolation_mode, padding_mode, align_corners)
    return _sample(opmath(input), opmath(grid), *settings)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    grad_output: Array,
    input: Array,
    grid: Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Array, ...]:
    """Gradients by image and grid, whatever the mask says: XLA drops results that are not used."""
    settings = (interpolation_mode, padding_mode, align_corners)
    _, pull = jax.vjp(lambda x, g: _sample(x, g, *settings), opmath(input), opmath(grid))
    return pull(opmath(grad_output))


@rule(aten.affine_grid_generator.default)
def affine_grid_generator(theta: Array, size: Sequence[int], align_corners: bool) -> Array:
    """The grid of an image of ``size`` under affine maps ``[N, dims, dims + 1]``."""
    axes = []
    for count in size[2:]:
        line = np.linspace(-1, 1, count) if count > 1 else np.zeros(count)
        axes.append(line if align_corners else line * (count - 1) / count)
    base = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(tuple(size[2:]))], -1)
    return jnp.einsum("...i,nji->n...j", jnp.asarray(base, theta.dtype), theta)
