"""Rules that pass varying lengths through matrix products and convolutions."""

from __future__ import annotations

from typing import Final

from xla_core.jax_bridge.jax_private import Equation
from xla_core.varying.interpreter import bind, padding_rule
from xla_core.varying.padded import Dim, Frame, NotCoveredError, Padded, common_dims

MSG_SPATIAL: Final = "a convolution whose kernel or groups depend on a length"


@padding_rule("dot_general")
def dot_general(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Fills the padding of contracted dimensions with zeros in both operands, since zero times NaN is NaN."""
    left, right = values
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    for axis, other in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        pair = [Padded(None, (left.dims[axis],)), Padded(None, (right.dims[other],))]
        wanted = Dim(common_dims(pair)[0].factors)
        left = frame.laid_out(left, axis, wanted)
        right = frame.laid_out(right, other, wanted)
    left = frame.masked(left, left_summed, 0)
    right = frame.masked(right, right_summed, 0)
    dims = [left.dims[axis] for axis in left_batch]
    for value, gone in (
        (left, (*left_summed, *left_batch)),
        (right, (*right_summed, *right_batch)),
    ):
        dims += [dim for axis, dim in enumerate(value.dims) if axis not in gone]
    return [Padded(bind(equation, left.array, right.array), tuple(dims))]


@padding_rule("conv_general_dilated")
def convolution(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Fills the padding of spatial dimensions with zeros, as a convolution does; the batch needs no change."""
    left, right = values
    params = equation.params
    numbers = params["dimension_numbers"]
    batch, features, *spatial = numbers.lhs_spec
    grouped = params["batch_group_count"] != 1 or params["feature_group_count"] != 1
    if right.dims[numbers.rhs_spec[0]].varies:
        raise NotCoveredError(MSG_SPATIAL)
    for axis in numbers.rhs_spec[
        2:
    ]:  # varies in a kernel's gradient: there the gradient of the output is the kernel
        right = frame.plain(right, axis)
    right = frame.masked(right, numbers.rhs_spec[2:], 0)
    if left.dims[features].varies:  # summed over: in a kernel's gradient the features are the batch
        if grouped:
            raise NotCoveredError(MSG_SPATIAL)
        left, right = _summed(frame, left, features, right, numbers.rhs_spec[1])
    elif params["batch_group_count"] != 1 and left.dims[batch].varies:
        raise NotCoveredError(MSG_SPATIAL)
    left = frame.spread(left, batch)
    sizes = equation.outvars[0].aval.shape
    dims: list[Dim] = [Dim(_factors(size)) for size in sizes]
    dims[numbers.out_spec[0]] = left.dims[batch]
    for axis in spatial:
        left = frame.plain(left, axis)
    left = frame.masked(left, spatial, 0)
    padding = _enough(frame, equation, left, right, dims)
    array = bind(equation, left.array, right.array, padding=padding)
    for axis, places in enumerate(frame.shape(dims)):
        array = frame.cut(array, axis, places)
    return [Padded(array, tuple(dims))]


def _summed(
    frame: Frame, left: Padded, axis: int, right: Padded, other: int
) -> tuple[Padded, Padded]:
    """Gives both operands the same layout along the summed dimension, with zeros in its padding."""
    pair = [Padded(None, (left.dims[axis],)), Padded(None, (right.dims[other],))]
    wanted = Dim(common_dims(pair)[0].factors)
    left = frame.laid_out(left, axis, wanted)
    right = frame.laid_out(right, other, wanted)
    return frame.masked(left, (axis,), 0), frame.masked(right, (other,), 0)


def _factors(size: object) -> tuple[object, ...]:
    return () if isinstance(size, int) and size == 1 else (size,)


def _enough(
    frame: Frame, equation: Equation, left: Padded, right: Padded, dims: list[Dim]
) -> object:
    """The convolution's padding, widened at the end where the result would have fewer places than its bound."""
    params = equation.params
    numbers = params["dimension_numbers"]
    padding = []
    for at, (low, high) in enumerate(params["padding"]):
        axis, kernel = numbers.lhs_spec[at + 2], numbers.rhs_spec[at + 2]
        if not isinstance(low, int):
            raise NotCoveredError(MSG_SPATIAL)
        if left.dims[axis].varies or right.dims[kernel].varies:
            wanted = frame.places(dims[numbers.out_spec[at + 2]])
            inside = (left.array.shape[axis] - 1) * params["lhs_dilation"][at] + 1
            reach = (right.array.shape[kernel] - 1) * params["rhs_dilation"][at] + 1
            needed = (wanted - 1) * params["window_strides"][at] + reach
            high = needed - inside - low
        elif not isinstance(high, int):
            raise NotCoveredError(MSG_SPATIAL)
        padding.append((low, high))
    return tuple(padding)
