"""Resizing by the nearest entry, by linear and by cubic interpolation, and the gradients.

Interpolation is one matrix along each dimension, and its gradient the transposed matrices: no
gather, no scatter. Whole-number enlargements by the nearest entry are a broadcast. Places and
weights are NumPy's; where a size varies (docs/shapes.md) the program computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch._ops import OpOverload

from xla_core.jax_bridge.symbolic_sizes import bounds, is_symbolic
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering.rules.common import count_as, opmath, present
from xla_core.lowering.rules.window import separable, transposed
from xla_core.operators.lowering_registry import rule

aten = torch.ops.aten

# Source of one output entry: places and weights, each of shape [out, taps].
_Taps = tuple[TracedValue, TracedValue]

# The parameter of PyTorch's cubic kernel.
_CUBIC_A = -0.75


_Precision = type[np.float32] | type[np.float64]


def _precision_of(array: Array) -> _Precision:
    """What PyTorch computes the places of sources in, of ``array`` after ``opmath``."""
    return np.float64 if array.dtype in (np.float64, np.uint8) else np.float32


def _numbers(*sizes: int) -> ModuleType:
    """What computes with places along these sizes: numpy, or jax.numpy where one of them varies."""
    return jnp if any(map(is_symbolic, sizes)) else np


def _step(size: int, count: int, scale: float | None, precision: _Precision) -> TracedValue:
    """How far apart two neighbours' sources are."""
    if scale:
        return precision(1 / scale)
    if _numbers(size, count) is np:
        return precision(size) / precision(count)
    if precision is np.float32:
        return _float32_quotient(size, count)
    return _float64(size) / _float64(count)


def _float64(size: int) -> Array:
    return jnp.asarray(size, np.float64)


def _float32_quotient(size: int, count: int) -> Array:
    """``size / count`` rounded to float32 as IEEE 754 has it, on devices whose division is not so exact, too.

    Both are above 0 and below 2**31.
    """
    above, below = jnp.asarray(size, np.int64), jnp.asarray(count, np.int64)
    # so that the quotient of integers has 24 or 25 bits
    shift = 24 + lax.clz(above) - lax.clz(below)
    up, down = jnp.maximum(shift, 0), jnp.maximum(-shift, 0)
    below = below << down
    quotient, rest = lax.div(above << up, below), lax.rem(above << up, below)
    long = quotient >> 24
    half_more = jnp.where(long == 1, 1, 0)
    kept = quotient >> half_more
    cut = (quotient - (kept << half_more)) * below + rest
    half = below << half_more
    odd = kept & 1
    kept = kept + jnp.where((2 * cut > half) | ((2 * cut == half) & (odd == 1)), 1, 0)
    exponent = (127 - shift + half_more).astype(np.int32)
    scale = lax.bitcast_convert_type(exponent << 23, np.float32)
    return kept.astype(np.float32) * scale


def _nearest_places(size: int, count: int, scale: float | None, shift: float) -> TracedValue:
    numbers = _numbers(size, count)
    place = numbers.arange(count, dtype=np.float32)
    # In float32 whatever the operand is.
    source = numbers.floor((place + np.float32(shift)) * _step(size, count, scale, np.float32))
    last = count_as(size - 1, source.dtype)
    return numbers.minimum(source, last).astype(np.int32)


def _sources(
    size: int, count: int, align_corners: bool, scale: float | None, precision: _Precision
) -> TracedValue:
    numbers = _numbers(size, count)
    place = numbers.arange(count, dtype=np.float64)
    if align_corners and numbers is np:
        return place * ((size - 1) / (count - 1) if count > 1 else 0.0)
    if align_corners:
        gaps = jnp.maximum(_float64(count - 1), 1.0)
        return place * (_float64(size - 1) / gaps)
    step = np.float64(1) * _step(size, count, scale, precision)
    return step * (place + 0.5) - 0.5


def _linear_taps(
    size: int, count: int, align_corners: bool, scale: float | None, precision: _Precision
) -> _Taps:
    numbers = _numbers(size, count)
    source = numbers.maximum(_sources(size, count, align_corners, scale, precision), 0)
    last = count_as(size - 1, np.dtype(np.int64))
    low = numbers.minimum(numbers.floor(source).astype(np.int64), last)
    share = numbers.clip(source - low, 0, 1)
    high = numbers.minimum(low + 1, last)
    return numbers.stack([low, high], 1), numbers.stack([1 - share, share], 1)


def _cubic_taps(
    size: int, count: int, align_corners: bool, scale: float | None, precision: _Precision
) -> _Taps:
    numbers = _numbers(size, count)
    source = _sources(size, count, align_corners, scale, precision)
    low = numbers.floor(source)
    distances = numbers.abs((source - low)[:, None] - np.arange(-1, 3))
    near = ((_CUBIC_A + 2) * distances - (_CUBIC_A + 3)) * distances**2 + 1
    far = ((distances - 5) * distances + 8) * distances * _CUBIC_A - 4 * _CUBIC_A
    last = count_as(size - 1, np.dtype(np.int64))
    places = numbers.clip((low[:, None] + np.arange(-1, 3)).astype(np.int64), 0, last)
    return places, numbers.where(distances <= 1, near, far)


def _matrix(size: int, count: int, taps: _Taps) -> TracedValue:
    if _numbers(size, count) is np:
        matrix = np.zeros((count, size))
        np.add.at(matrix, (np.arange(count)[:, None], taps[0]), taps[1])
        return matrix
    places, weights = taps
    column = lax.broadcasted_iota(places.dtype, (count, size), 1)
    return sum(
        jnp.where(column == places[:, tap, None], weights[:, tap, None], 0.0)
        for tap in range(places.shape[1])
    )


_Interpolation = Callable[[int, int, bool, float | None, _Precision], _Taps]


def _matrices(
    taps: _Interpolation,
    sizes: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    precision: _Precision,
) -> list[TracedValue | None]:
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


def _whole_factor(size: int, count: int, scale: float | None, shift: float) -> int:
    """By how much the nearest entries enlarge a dimension, or 0 if not by a whole number."""
    factor, rest = divmod(count, size)
    if is_symbolic(factor) or is_symbolic(rest) or rest or not factor:
        return 0
    if is_symbolic(size):
        # for each size that there can be the places are those of the largest one
        size = int(bounds(size)[1])
        scale, count = scale or float(factor), size * factor
    places = _nearest_places(size, count, scale, shift)
    return factor if (places == np.arange(count) // factor).all() else 0


def _enlarge(x: Array, axis: int, count: int, scale: float | None, shift: float) -> Array:
    size = x.shape[axis]
    factor = _whole_factor(size, count, scale, shift)
    if not factor:
        return jnp.take(x, _nearest_places(size, count, scale, shift), axis, mode="clip")
    wide = jnp.broadcast_to(
        jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], factor, *x.shape[axis + 1 :])
    )
    return wide.reshape(*x.shape[:axis], count, *x.shape[axis + 1 :])


def _collect(grad: Array, axis: int, size: int, scale: float | None, shift: float) -> Array:
    count = grad.shape[axis]
    factor = _whole_factor(size, count, scale, shift)
    if factor:
        parts = grad.reshape(*grad.shape[:axis], size, factor, *grad.shape[axis + 1 :])
        return jnp.sum(parts, axis + 1)
    places = _nearest_places(size, count, scale, shift)
    matrix = _matrix(size, count, (places[:, None], _numbers(size, count).ones((count, 1))))
    tail: list[None] = [None] * (grad.ndim - axis - 1)
    return separable(grad, [matrix.T, *tail])


def _register_nearest(forward: OpOverload, backward: OpOverload, rank: int, shift: float) -> None:
    def resize(
        self: Array, output_size: Sequence[int], *scales: float | None, **named: float | None
    ) -> Array:
        steps = _all_scales([*scales, *named.values()], rank)
        for offset, (count, scale) in enumerate(zip(output_size, steps, strict=True)):
            axis = self.ndim - rank + offset
            if count != self.shape[axis]:
                self = _enlarge(self, axis, count, scale, shift)
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
                grad = _collect(grad, axis, size, scale, shift)
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
