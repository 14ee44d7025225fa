"""Resizing by the nearest entry, by linear and by cubic interpolation, and the gradients.

Interpolation is one matrix along each dimension, and its gradient the transposed matrices: no
gather, no scatter. Whole-number enlargements by the nearest entry are a broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch._ops import OpOverload

from xla_core.lowering.rules.common import opmath, present
from xla_core.lowering.rules.window import separable, transposed
from xla_core.operators.lowering_registry import rule

aten = torch.ops.aten

# Source of one output entry: places and weights, each of shape [out, taps].
_Taps = tuple[np.ndarray, np.ndarray]

# The parameter of PyTorch's cubic kernel.
_CUBIC_A = -0.75


_Precision = type[np.float32] | type[np.float64]


def _precision_of(array: Array) -> _Precision:
    """What PyTorch computes the places of sources in, of ``array`` after ``opmath``."""
    return np.float64 if array.dtype in (np.float64, np.uint8) else np.float32


def _step(size: int, count: int, scale: float | None, precision: _Precision) -> Any:
    """How far apart two neighbours' sources are."""
    return precision(1 / scale) if scale else precision(size) / precision(count)


def _nearest_places(size: int, count: int, scale: float | None, shift: float) -> np.ndarray:
    place = np.arange(count, dtype=np.float32)
    # In float32 whatever the operand is.
    source = np.floor((place + np.float32(shift)) * _step(size, count, scale, np.float32))
    return np.minimum(source, size - 1).astype(np.int32)


def _sources(
    size: int, count: int, align_corners: bool, scale: float | None, precision: _Precision
) -> np.ndarray:
    place = np.arange(count, dtype=np.float64)
    if align_corners:
        return place * ((size - 1) / (count - 1) if count > 1 else 0.0)
    return float(_step(size, count, scale, precision)) * (place + 0.5) - 0.5


def _linear_taps(
    size: int, count: int, align_corners: bool, scale: float | None, precision: _Precision
) -> _Taps:
    source = np.maximum(_sources(size, count, align_corners, scale, precision), 0)
    low = np.minimum(np.floor(source), size - 1).astype(np.int64)
    share = np.clip(source - low, 0, 1)
    high = np.minimum(low + 1, size - 1)
    return np.stack([low, high], 1), np.stack([1 - share, share], 1)


def _cubic_taps(
    size: int, count: int, align_corners: bool, scale: float | None, precision: _Precision
) -> _Taps:
    source = _sources(size, count, align_corners, scale, precision)
    low = np.floor(source)
    distances = np.abs((source - low)[:, None] - np.arange(-1, 3))
    near = ((_CUBIC_A + 2) * distances - (_CUBIC_A + 3)) * distances**2 + 1
    far = ((distances - 5) * distances + 8) * distances * _CUBIC_A - 4 * _CUBIC_A
    places = np.clip(low[:, None] + np.arange(-1, 3), 0, size - 1).astype(np.int64)
    return places, np.where(distances <= 1, near, far)


def _matrix(size: int, count: int, taps: _Taps) -> np.ndarray:
    matrix = np.zeros((count, size))
    np.add.at(matrix, (np.arange(count)[:, None], taps[0]), taps[1])
    return matrix


_Interpolation = Callable[[int, int, bool, float | None, _Precision], _Taps]


def _matrices(
    taps: _Interpolation,
    sizes: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    precision: _Precision,
) -> list[np.ndarray | None]:
    return [
        None if n == m else _matrix(n, m, taps(n, m, align_corners, s, precision))
        for n, m, s in zip(sizes, counts, scales, strict=True)
    ]


def _all_scales(scales: Sequence[float | None], rank: int) -> list[float | None]:
    return [*scales, *[None] * (rank - len(scales))]


def _register_interpolation(
    forward: OpOverload, backward: OpOverload, rank: int, taps: _Interpolation
) -> None:
    def resize(
        self: Array,
        output_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
        **named: float | None,
    ) -> Array:
        steps = _all_scales([*scales, *named.values()], rank)
        sizes = self.shape[self.ndim - rank :]
        x = opmath(self)
        precision = _precision_of(x)
        return separable(x, _matrices(taps, sizes, output_size, align_corners, steps, precision))

    def resize_backward(
        grad_output: Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
        **named: float | None,
    ) -> Array:
        steps = _all_scales([*scales, *named.values()], rank)
        sizes = input_size[len(input_size) - rank :]
        grad = opmath(grad_output)
        precision = _precision_of(grad)
        matrices = _matrices(taps, sizes, output_size, align_corners, steps, precision)
        return separable(grad, transposed(matrices))

    rule(forward)(resize)
    rule(backward)(resize_backward)


def _whole_factor(places: np.ndarray, size: int) -> int:
    """By how much the nearest entries enlarge a dimension, or 0 if not by a whole number."""
    factor, rest = divmod(len(places), size)
    return factor if not rest and (places == np.arange(len(places)) // factor).all() else 0


def _enlarge(x: Array, axis: int, places: np.ndarray) -> Array:
    factor = _whole_factor(places, x.shape[axis])
    if not factor:
        return jnp.take(x, places, axis)
    wide = jnp.broadcast_to(
        jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], factor, *x.shape[axis + 1 :])
    )
    return wide.reshape(*x.shape[:axis], len(places), *x.shape[axis + 1 :])


def _collect(grad: Array, axis: int, places: np.ndarray, size: int) -> Array:
    factor = _whole_factor(places, size)
    if factor:
        parts = grad.reshape(*grad.shape[:axis], size, factor, *grad.shape[axis + 1 :])
        return jnp.sum(parts, axis + 1)
    matrix = _matrix(size, len(places), (places[:, None], np.ones((len(places), 1))))
    tail: list[Any] = [None] * (grad.ndim - axis - 1)
    return separable(grad, [matrix.T, *tail])


def _register_nearest(forward: OpOverload, backward: OpOverload, rank: int, shift: float) -> None:
    def resize(
        self: Array, output_size: Sequence[int], *scales: float | None, **named: float | None
    ) -> Array:
        steps = _all_scales([*scales, *named.values()], rank)
        for offset, (count, scale) in enumerate(zip(output_size, steps, strict=True)):
            axis = self.ndim - rank + offset
            if count != self.shape[axis]:
                places = _nearest_places(self.shape[axis], count, scale, shift)
                self = _enlarge(self, axis, places)
        return self

    def resize_backward(
        grad_output: Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *scales: float | None,
        **named: float | None,
    ) -> Array:
        steps = _all_scales([*scales, *named.values()], rank)
        grad = opmath(grad_output)
        for offset, scale in enumerate(steps):
            axis = grad.ndim - rank + offset
            size, count = input_size[axis], output_size[offset]
            if count != size:
                grad = _collect(grad, axis, _nearest_places(size, count, scale, shift), size)
        return grad

    rule(forward)(resize)
    rule(backward)(resize_backward)


def _register(name: str, register: Callable[..., None], *settings: object) -> None:
    overloads = present(name, f"{name}_backward")
    if len(overloads) == 2:
        register(overloads[0], overloads[1], *settings)


_CENTRE = 0.5
for _rank in (1, 2, 3):
    _register(f"upsample_nearest{_rank}d", _register_nearest, _rank, 0.0)
    _register(f"_upsample_nearest_exact{_rank}d", _register_nearest, _rank, _CENTRE)
_register("upsample_linear1d", _register_interpolation, 1, _linear_taps)
_register("upsample_bilinear2d", _register_interpolation, 2, _linear_taps)
_register("upsample_trilinear3d", _register_interpolation, 3, _linear_taps)
_register("upsample_bicubic2d", _register_interpolation, 2, _cubic_taps)


def _unpooled(
    self: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int], *_settings: object
) -> torch.Tensor:
    return self.new_empty(*self.shape[: self.dim() - len(output_size)], *output_size)


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default, meta=_unpooled)
def max_unpool(
    self: Array, indices: Array, output_size: Sequence[int], *settings: Sequence[int]
) -> Array:
    """Maxima put back at their places, zeros elsewhere; the indices say all that matters."""
    lead = self.shape[: self.ndim - len(output_size)]
    planes = math.prod(lead)
    flat = jnp.zeros((planes, math.prod(output_size)), self.dtype)
    place = indices.reshape(planes, math.prod(indices.shape[len(lead) :]))
    rows = np.arange(planes)[:, None]
    whole = flat.at[rows, place].set(self.reshape(place.shape))
    return whole.reshape(*lead, *output_size)
