"""Rules that pass varying lengths through reshape, transpose, slices, concatenation and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.jax_bridge.jax_private import Equation
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.jax_bridge.traced_values import Size, TracedValue
from xla_core.varying.interpreter import bind, padding_rule
from xla_core.varying.padded import (
    Dim,
    Frame,
    NotCoveredError,
    Padded,
    common_dims,
    dim_of,
    dim_of_factors,
)
from xla_core.varying.rules.elementwise import aligned

MSG_RESHAPE: Final = "sizes {given} cannot be seen as {wanted} for every length"
MSG_ORDER: Final = "a reshape that reads dimensions in another order"
MSG_STRIDE: Final = "a slice with steps that begins at a varying place"
MSG_SPREAD_PADDING: Final = (
    "padding before a dimension that depends on a length, and may be negative"
)


@padding_rule("broadcast_in_dim")
def broadcast_in_dim(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Adds dimensions; a new varying one is uniform (one place for all elements) until an operation needs more."""
    value, *_ = values  # sizes that are read at run time come behind it
    sizes = equation.params["shape"]
    placed = dict(zip(equation.params["broadcast_dimensions"], value.dims, strict=True))
    dims = []
    for axis, size in enumerate(sizes):
        dim = placed.get(axis)
        if dim is None or not dim.factors:
            dim = Dim(dim_of(size).factors, uniform=is_symbolic(size))
        dims.append(dim)
    array = lax.broadcast_in_dim(value.array, frame.shape(dims), tuple(placed))
    return [Padded(array, tuple(dims))]


@padding_rule("transpose")
def transpose(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Permutes the dimensions."""
    (value,) = values
    order = equation.params["permutation"]
    dims = tuple(value.dims[axis] for axis in order)
    return [Padded(lax.transpose(value.array, order), dims)]


@padding_rule("squeeze")
def squeeze(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Removes dimensions of size 1."""
    (value,) = values
    gone = {axis % len(value.dims) for axis in equation.params["dimensions"]}
    dims = tuple(dim for axis, dim in enumerate(value.dims) if axis not in gone)
    return [Padded(value.array.reshape(frame.shape(dims)), dims)]


@padding_rule("reshape")
def reshape(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Regroups the factors of the dimensions; moves elements only where the factors do not fit the new sizes."""
    value, *_ = values
    if equation.params.get("dimensions") is not None:
        raise NotCoveredError(MSG_ORDER)
    wanted = equation.params["new_sizes"]
    if any(same_size(size, 0) for size in wanted):
        dims = [dim_of(size) for size in wanted]
        return [Padded(jnp.zeros(frame.shape(dims), value.array.dtype), tuple(dims))]
    for axis in range(len(value.dims)):
        value = frame.spread(value, axis)
    for _ in range(len(value.dims) + 1):
        dims, split = _regrouped(value, wanted)
        if split is None:
            return [Padded(value.array.reshape(frame.shape(dims)), tuple(dims))]
        axis, factors = split
        value = frame.laid_out(value, axis, dim_of_factors(factors))
    raise NotCoveredError(MSG_RESHAPE.format(given=value.sizes, wanted=wanted))


def _regrouped(
    value: Padded, wanted: Sequence[object]
) -> tuple[list[Dim], tuple[int, list[object]] | None]:
    """Groups the factors of ``value`` into dimensions of the ``wanted`` sizes.

    Returns the dimensions and None, or, if the factors do not fit, the axis that has to be laid out differently
    first and its new factors.
    """
    factors = [(axis, factor) for axis, dim in enumerate(value.dims) for factor in dim.factors]
    dims: list[Dim] = []
    for size in wanted:
        collected: list[object] = []
        rest = size
        while not _is_one(rest):
            if not factors:
                raise NotCoveredError(MSG_RESHAPE.format(given=value.sizes, wanted=wanted))
            axis, factor = factors.pop(0)
            quotient = _divided(rest, factor)
            if quotient is not None:
                collected.append(factor)
                rest = quotient
                continue
            behind = _divided(factor, rest)
            if behind is None:
                raise NotCoveredError(MSG_RESHAPE.format(given=value.sizes, wanted=wanted))
            if is_symbolic(factor):  # its elements lie side by side: they need places in both parts
                others = [f for a, f in factors if a == axis]
                before = list(value.dims[axis].factors[: -len(others) - 1])
                return dims, (axis, [*before, rest, behind, *others])
            collected.append(rest)
            factors.insert(0, (axis, behind))
            rest = 1
        dims.append(dim_of_factors(collected))
    return dims, None


def _is_one(size: object) -> bool:
    return not is_symbolic(size) and size == 1


def _divided(size: Size, by: Size) -> object:
    """``size / by`` if it is an integer for every length, else None."""
    if not is_symbolic(size) and (is_symbolic(by) or by == 0):
        return None
    quotient, rest = divmod(size, by)
    if is_symbolic(rest) or rest != 0:
        return None
    return quotient


@padding_rule("expand_dims")
def expand_dims(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Adds dimensions of size 1."""
    (value,) = values
    dims = list(value.dims)
    for axis in sorted(equation.params["dimensions"]):
        dims.insert(axis, Dim(()))
    return [Padded(value.array.reshape(frame.shape(dims)), tuple(dims))]


def window(
    frame: Frame,
    value: Padded,
    starts: Sequence[Size],
    sizes: Sequence[Size],
    strides: Sequence[int],
) -> Padded:
    """Takes ``sizes`` elements from ``starts`` on, ``strides`` apart, along each dimension.

    Starts are Python integers, symbolic sizes or jax integers; the caller has clamped them to the value.
    """
    dims = list(value.dims)
    for axis, (start, size, stride) in enumerate(zip(starts, sizes, strides, strict=True)):
        whole = value.dims[axis].size
        if isinstance(start, int) and start == 0 and stride == 1 and same_size(whole, size):
            continue
        value = Padded(frame.plain(value, axis).array, tuple(dims))
        dims[axis] = dim_of(size)
        places = frame.bound(size)
        reach = (places - 1) * stride + 1 if places else 0
        if isinstance(start, int):
            array = frame.grown(value, axis, start + reach)
            array = lax.slice_in_dim(array, start, start + reach, stride, axis)
        else:
            if stride != 1:
                raise NotCoveredError(MSG_STRIDE)
            first = frame.number(start) if is_symbolic(start) else start.astype(np.int32)
            array = frame.grown(value, axis, value.array.shape[axis] + places)
            array = lax.dynamic_slice_in_dim(array, first, places, axis)
        value = Padded(array, tuple(dims))
    return Padded(value.array, tuple(dims))


def same_size(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for every length."""
    difference = left - right
    return not is_symbolic(difference) and difference == 0


@padding_rule("slice")
def slice_(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Slices at starts that are constants or depend on the lengths."""
    (value,) = values
    params = equation.params
    strides = params["strides"] or (1,) * len(value.dims)
    sizes = equation.outvars[0].aval.shape
    return [window(frame, value, params["start_indices"], sizes, strides)]


def limited(frame: Frame, start: TracedValue, whole: Size, size: Size) -> Array:
    """Clamps the start of a slice of ``size`` elements to the true length ``whole``, as without padding."""
    if start.dtype.itemsize < 4:
        start = start.astype(np.int32)  # the largest start may not fit into a narrower integer
    most = frame.number(whole - size)
    return jnp.clip(start, 0, jnp.asarray(most).astype(start.dtype))


@padding_rule("dynamic_slice")
def dynamic_slice(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Slices at computed starts, which are clamped to the true length."""
    value, *starts = values
    sizes = equation.outvars[0].aval.shape
    places = [
        0 if same_size(dim.size, size) else limited(frame, start.array, dim.size, size)
        for start, dim, size in zip(starts, value.dims, sizes, strict=False)
    ]
    return [window(frame, value, places, sizes, (1,) * len(sizes))]


@padding_rule("dynamic_update_slice")
def dynamic_update_slice(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Replaces a slice at a computed start; the padding of the update leaves the operand unchanged."""
    value, update, *starts = values
    firsts: list[TracedValue] = []
    shape: list[int] = []
    for axis, start in enumerate(starts):
        dim, part = value.dims[axis], update.dims[axis]
        if same_size(dim.size, part.size):
            dims = common_dims([Padded(None, (dim,)), Padded(None, (part,))])
            wanted = Dim(dims[0].factors)
            value, update = (frame.laid_out(v, axis, wanted) for v in (value, update))
            firsts.append(np.int32(0))
            shape.append(frame.places(wanted))
        else:
            value, update = frame.plain(value, axis), frame.plain(update, axis)
            firsts.append(limited(frame, start.array, dim.size, part.size).astype(np.int32))
            shape.append(frame.bound(dim.size) + frame.bound(part.size))
    array = value.array
    for axis, places in enumerate(shape):
        array = frame.grown(Padded(array, value.dims), axis, places)
    old = Padded(lax.dynamic_slice(array, firsts, update.array.shape), update.dims)
    new = _where_valid(frame, update, old.array)
    array = lax.dynamic_update_slice(array, new, firsts)
    for axis, dim in enumerate(value.dims):
        array = frame.cut(array, axis, frame.places(dim))
    return [Padded(array, value.dims)]


def _where_valid(frame: Frame, value: Padded, other: object) -> TracedValue:
    """The array of ``value``, with the elements of ``other`` in place of its padding."""
    array = value.array
    for axis, dim in enumerate(value.dims):
        valid = frame.valid(dim)
        if valid is not None:
            shape = [1] * len(value.dims)
            shape[axis] = -1
            mask = jnp.broadcast_to(valid.reshape(shape), array.shape)
            array = lax.select(mask, array, other)
    return array


@padding_rule("concatenate")
def concatenate(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Writes each operand where the elements of the previous one end, over the padding of that one."""
    along = equation.params["dimension"]
    columns = common_dims([Padded(None, (*v.dims[:along], *v.dims[along + 1 :])) for v in values])
    dims = [Dim(dim.factors) for dim in columns]
    total = dim_of(equation.outvars[0].aval.shape[along])
    parts = []
    for value in values:
        laid = frame.plain(value, along)
        others = [*dims[:along], laid.dims[along], *dims[along:]]
        for axis, dim in enumerate(others):
            laid = frame.laid_out(laid, axis, dim)
        parts.append(laid)
    result = (*dims[:along], total, *dims[along:])
    if not any(map(is_symbolic, (size for part in parts for size in part.dims[along].factors))):
        return [Padded(bind(equation, *(part.array for part in parts)), result)]
    room = sum(part.array.shape[along] for part in parts)
    shape = list(frame.shape(result))
    shape[along] = room
    array = jnp.zeros(shape, parts[0].array.dtype)
    offset: Size = 0
    for part in parts:
        array = lax.dynamic_update_slice_in_dim(array, part.array, frame.number(offset), along)
        offset = offset + part.dims[along].size
    return [Padded(frame.cut(array, along, frame.places(total)), result)]


@padding_rule("stack")
def stack(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Joins the operands along a new dimension."""
    along = equation.params["axis"]
    arrays, dims = aligned(frame, values)
    return [Padded(bind(equation, *arrays), (*dims[:along], Dim((len(values),)), *dims[along:]))]


@padding_rule("split")
def split(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Cuts the operand into consecutive slices along one dimension."""
    (value,) = values
    along, offset = equation.params["axis"], 0
    parts = []
    for variable in equation.outvars:
        starts = [0] * len(value.dims)
        starts[along] = offset
        parts.append(window(frame, value, starts, variable.aval.shape, (1,) * len(starts)))
        offset = offset + variable.aval.shape[along]
    return parts


@padding_rule("pad")
def pad(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Pads before, after and between elements; the fill value also replaces the padding of the operand."""
    value, filling = values
    config = equation.params["padding_config"]
    sizes = equation.outvars[0].aval.shape
    dims = list(value.dims)
    for axis, (low, high, between) in enumerate(config):
        if not is_symbolic(low) and not is_symbolic(high) and (low, high, between) == (0, 0, 0):
            continue
        laid = frame.plain(Padded(value.array, tuple(dims)), axis)
        if is_symbolic(low):
            dims[axis] = dim_of(sizes[axis])
            value = Padded(_placed_at(frame, laid, axis, config[axis], filling), tuple(dims))
            continue
        whole = laid.dims[axis].size
        dims[axis] = dim_of(sizes[axis])
        places = frame.bound(sizes[axis])
        reach = low + (laid.array.shape[axis] - 1) * (between + 1) + 1
        widths = [(0, 0, 0)] * len(dims)
        widths[axis] = (low, places - reach, between)
        array = lax.pad(laid.array, filling.array, widths)
        last = jnp.asarray(frame.number(whole)).astype(np.int32) - 1
        inside = lax.broadcasted_iota(np.int32, array.shape, axis) <= low + last * (between + 1)
        filled = jnp.broadcast_to(filling.array, array.shape)
        value = Padded(lax.select(inside, array, filled), tuple(dims))
    return [Padded(value.array, tuple(dims))]


def _placed_at(
    frame: Frame, value: Padded, axis: int, config: tuple[object, object, object], filling: Padded
) -> object:
    """Pads along ``axis`` where the number of elements before the operand depends on a length."""
    low, high, between = config
    if between != 0 or min(symbolic_sizes.bounds(low)[0], symbolic_sizes.bounds(high)[0]) < 0:
        raise NotCoveredError(MSG_SPREAD_PADDING)
    places = frame.bound(value.dims[axis].size + low + high)
    inside = frame.masked(value, (axis,), filling.array).array
    shape = list(inside.shape)
    shape[axis] = max(places, frame.bound(low) + inside.shape[axis])
    array = jnp.broadcast_to(filling.array, shape)
    array = lax.dynamic_update_slice_in_dim(array, inside, frame.number(low), axis)
    return frame.cut(array, axis, places)


@padding_rule("rev")
def reverse(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Reverses dimensions, then moves the elements to the front, before the padding."""
    (value,) = values
    for axis in equation.params["dimensions"]:
        value = frame.plain(value, axis)
        dim = value.dims[axis]
        array = lax.rev(value.array, (axis,))
        if dim.varies:
            places = array.shape[axis]
            grown = frame.grown(value.with_array(array), axis, 2 * places)
            first = places - frame.number(dim.size)
            array = lax.dynamic_slice_in_dim(grown, first, places, axis)
        value = value.with_array(array)
    return [value]
