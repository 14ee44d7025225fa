"""Rules that pass varying lengths through reductions, cumulative operations, sorting, top-k and windows."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.jax_private import Equation
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.lowering.rules.scans import running_log_sum
from xla_core.varying.interpreter import bind, padding_rule
from xla_core.varying.padded import Frame, NotCoveredError, Padded, dim_of
from xla_core.varying.rules.elementwise import aligned

MSG_COMPLEX: Final = "the smallest or largest of complex numbers"
MSG_COUNT: Final = "as many elements as a length says"
MSG_WINDOW: Final = "windows as large as a length says"


def lowest(dtype: object) -> object:
    """The smallest value of a type; NotCoveredError for complex types."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise NotCoveredError(MSG_COMPLEX)
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def highest(dtype: object) -> object:
    """The largest value of a type; NotCoveredError for complex types."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise NotCoveredError(MSG_COMPLEX)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max


def _zero(dtype: object) -> object:
    return 0


def _one(dtype: object) -> object:
    return 1


def _all_ones(dtype: np.dtype) -> object:
    return True if dtype == np.bool_ else np.array(-1).astype(dtype)


# The neutral element of each primitive, as a function of the dtype: padding filled with it changes no result.
_NEUTRAL: Final = {
    "reduce_sum": _zero,
    "reduce_prod": _one,
    "reduce_max": lowest,
    "reduce_min": highest,
    "reduce_or": _zero,
    "reduce_xor": _zero,
    "reduce_and": _all_ones,
    "cumsum": _zero,
    "cumprod": _one,
    "cummax": lowest,
    "cummin": highest,
    "argmax": lowest,
    "argmin": highest,
}


@padding_rule(*(name for name in _NEUTRAL if name.startswith("reduce_")))
def reduction(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Fills the padding along the reduced dimensions with the neutral element."""
    (value,) = values
    axes = equation.params["axes"]
    value = frame.masked(value, axes, _NEUTRAL[equation.primitive.name](value.array.dtype))
    dims = tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes)
    return [Padded(bind(equation, value.array), dims)]


@padding_rule("argmax", "argmin")
def position(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """The index of the first extreme element, in the contiguous layout: equal padding comes after it."""
    (value,) = values
    (axis,) = equation.params["axes"]
    value = frame.plain(value, axis)
    value = frame.masked(value, (axis,), _NEUTRAL[equation.primitive.name](value.array.dtype))
    dims = (*value.dims[:axis], *value.dims[axis + 1 :])
    return [Padded(bind(equation, value.array), dims)]


@padding_rule("cumsum", "cumprod", "cummax", "cummin")
def cumulative(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Accumulates in the contiguous layout; in reverse, padding comes first and becomes the neutral element."""
    (value,) = values
    axis = equation.params["axis"]
    value = frame.plain(value, axis)
    if equation.params["reverse"]:
        fill = _NEUTRAL[equation.primitive.name](value.array.dtype)
        value = frame.masked(value, (axis,), fill)
    return [value.with_array(bind(equation, value.array))]


@padding_rule("cumlogsumexp")
def running_logarithm(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Accumulates in the contiguous layout, with the rounding of the unpadded program.

    In reverse the padding comes first and is filled with minus infinity, the logarithm of zero.
    """
    (value,) = values
    axis = equation.params["axis"]
    value = frame.plain(value, axis)
    if not equation.params["reverse"]:
        return [value.with_array(running_log_sum(value.array, axis))]
    value = frame.masked(value, (axis,), -np.inf)
    sums = running_log_sum(lax.rev(value.array, (axis,)), axis)
    return [value.with_array(lax.rev(sums, (axis,)))]


@padding_rule("sort")
def sort(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Sorts by one more, leading key, which is 1 for padding and 0 for elements: padding ends up last."""
    axis = equation.params["dimension"]
    values = [frame.plain(value, axis) for value in values]
    arrays, dims = aligned(frame, values)
    arrays = [jnp.broadcast_to(array, frame.shape(dims)) for array in arrays]
    valid = frame.valid(dims[axis])
    if valid is None:
        results = bind(equation, *arrays)
    else:
        shape = [1] * len(dims)
        shape[axis] = -1
        behind = jnp.broadcast_to(~valid.reshape(shape), frame.shape(dims)).astype(np.int8)
        keys = equation.params["num_keys"] + 1
        results = bind(equation, behind, *arrays, num_keys=keys)[1:]
    return [Padded(array, dims) for array in results]


@padding_rule("top_k")
def top_k(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Fills the padding with the smallest value; equal elements come before it and are taken first."""
    (value,) = values
    axis, count = equation.params["axis"], equation.params["k"]
    if is_symbolic(count):
        raise NotCoveredError(MSG_COUNT)
    value = frame.plain(value, axis)
    array, dtype = value.array, value.array.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        array = _ordered(array)  # devices differ in how they order NaN and minus infinity
    value = frame.masked(value.with_array(array), (axis,), lowest(array.dtype))
    largest, places = bind(equation, value.array)
    if array.dtype != dtype:
        largest = lax.bitcast_convert_type(_flipped(largest), dtype)
    dims = (*value.dims[:axis], dim_of(count), *value.dims[axis + 1 :])
    return [Padded(largest, dims), Padded(places, dims)]


def _ordered(array: Array) -> object:
    """Maps floats to integers of the same order: negative NaN, minus infinity, ... infinity, positive NaN."""
    bits = lax.bitcast_convert_type(array, np.dtype(f"int{8 * array.dtype.itemsize}"))
    return _flipped(bits)


def _flipped(bits: Array) -> Array:
    return jnp.where(bits < 0, bits ^ bits.dtype.type(jnp.iinfo(bits.dtype).max), bits)


# The neutral element of each windowed reduction, as a function of the dtype.
_NEUTRAL_IN_WINDOWS: Final = {
    "reduce_window_max": lowest,
    "reduce_window_min": highest,
    "reduce_window_sum": _zero,
}


@padding_rule(*_NEUTRAL_IN_WINDOWS)
def windows(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Fills the padding with the neutral element, as outside the operand; computes as many windows as the bound."""
    (value,) = values
    params = equation.params
    dims = list(map(dim_of, equation.outvars[0].aval.shape))
    kinds = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    padding = list(params["padding"])
    fill = _NEUTRAL_IN_WINDOWS[equation.primitive.name](value.array.dtype)
    for axis, dim in enumerate(value.dims):
        if not dim.varies:
            continue
        window, stride, base, dilation = (params[kind][axis] for kind in kinds)
        low, high = padding[axis]
        if (window, stride, base, dilation, low, high) == (1, 1, 1, 1, 0, 0):
            value = frame.spread(value, axis)
            dims[axis] = value.dims[axis]
            continue
        if is_symbolic(window) or is_symbolic(low):
            raise NotCoveredError(MSG_WINDOW)
        value = frame.masked(frame.plain(value, axis), (axis,), fill)
        inside = (value.array.shape[axis] - 1) * base + 1
        needed = (frame.places(dims[axis]) - 1) * stride + (window - 1) * dilation + 1
        padding[axis] = (low, max(needed - inside - low, 0))
    array = bind(equation, value.array, padding=tuple(padding))
    for axis, places in enumerate(frame.shape(dims)):
        array = frame.cut(array, axis, places)
    return [Padded(array, tuple(dims))]
