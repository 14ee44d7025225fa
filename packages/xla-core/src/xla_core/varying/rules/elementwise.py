"""Rules that pass varying lengths through elementwise primitives and those that create arrays (iota, random)."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.jax_bridge.jax_private import Equation
from xla_core.varying.interpreter import bind, padding_rule
from xla_core.varying.padded import (
    Dim,
    Frame,
    NotCoveredError,
    Padded,
    as_padded,
    common_dims,
    dim_of,
)

# The padding of the operands ends up in the padding of the results, which is never read.
_ELEMENTWISE: Final = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clz", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "igamma_grad_a", "imag",
    "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt",
    "lt_to", "max", "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "polygamma", "population_count", "pow",
    "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
    "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
)  # fmt: skip

MSG_KEY_SHAPE: Final = "random numbers of many keys at once"
MSG_KEY_KIND: Final = "random numbers of a generator other than threefry"
MSG_WIDTH: Final = "a conversion that changes how many elements there are"


def aligned(frame: Frame, values: list[Padded]) -> tuple[list[object], tuple[Dim, ...]]:
    """Broadcasts all values but scalars to one shape; returns the arrays and their common dimensions."""
    ranked = [value for value in values if value.dims]
    dims = common_dims(ranked)
    shape = frame.shape(dims)
    laid = iter(frame.together(ranked, dims))
    arrays = [
        jnp.broadcast_to(next(laid).array, shape) if value.dims else value.array for value in values
    ]
    return arrays, dims


@padding_rule(*_ELEMENTWISE, "select_n", "clamp")
def elementwise(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Computes every place, padding too: an element of the result needs only the same place of each operand."""
    arrays, dims = aligned(frame, values)
    return [Padded(bind(equation, *arrays), dims)]


@padding_rule("bitcast_convert_type")
def bitcast(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Reinterprets the bits as another type; NotCoveredError if the width of the type changes."""
    (value,) = values
    wanted = np.dtype(equation.params["new_dtype"])
    if wanted.itemsize != value.array.dtype.itemsize:
        raise NotCoveredError(MSG_WIDTH)
    return [value.with_array(bind(equation, value.array))]


@padding_rule("optimization_barrier")
def barrier(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Passes the operands through one barrier, unchanged."""
    arrays = equation.primitive.bind(*(value.array for value in values), **equation.params)
    return [value.with_array(array) for value, array in zip(values, arrays, strict=True)]


@padding_rule("dim_as_value")
def size_as_value(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """The value of a size in this run, computed from the lengths and not from their bounds."""
    number = symbolic_sizes.evaluate(equation.params["dim"], frame.lengths)
    dtype = equation.outvars[0].aval.dtype
    return [as_padded(jnp.asarray(number).astype(dtype))]


@padding_rule("iota")
def iota(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Counts 0, 1, ... along one dimension; other varying dimensions stay uniform, with one place each."""
    params = equation.params
    sizes, along = params["shape"], params["dimension"]
    dims = tuple(
        Dim(dim_of(size).factors, uniform=axis != along and symbolic_sizes.is_symbolic(size))
        for axis, size in enumerate(sizes)
    )
    array = lax.broadcasted_iota(params["dtype"], frame.shape(dims), along)
    return [Padded(array, dims)]


@padding_rule("random_bits")
def random_bits(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """The bits that an unpadded array would get: threefry of each element's row-major index in it."""
    (key,) = values
    params = equation.params
    if key.dims:
        raise NotCoveredError(MSG_KEY_SHAPE)
    if (
        str(jax.random.key_impl(key.array)) != "threefry2x32"
        or not jax.config.jax_threefry_partitionable
    ):
        raise NotCoveredError(MSG_KEY_KIND)
    dims = tuple(map(dim_of, params["shape"]))
    shape = frame.shape(dims)
    number = jnp.zeros(shape, np.uint64)
    for axis, dim in enumerate(dims):
        size = jnp.asarray(frame.number(dim.size)).astype(np.uint64)
        number = number * size + lax.broadcasted_iota(np.uint64, shape, axis)
    width = params["bit_width"]
    words = symbolic_sizes.threefry(jax.random.key_data(key.array), number)
    high, low = words
    if width == 64:
        bits = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    else:
        bits = (high ^ low).astype(np.dtype(f"uint{width}"))
    return [Padded(bits, dims)]
