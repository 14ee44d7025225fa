"""How varying lengths pass primitives that work element by element, and those that make values from nothing."""

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
    """Arrays of equal shape for all values that have dimensions, and their common dimensions."""
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
    """Each element of the result comes from one element of every operand."""
    arrays, dims = aligned(frame, values)
    return [Padded(bind(equation, *arrays), dims)]


@padding_rule("bitcast_convert_type")
def bitcast(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """The same bits as another type of the same width."""
    (value,) = values
    wanted = np.dtype(equation.params["new_dtype"])
    if wanted.itemsize != value.array.dtype.itemsize:
        raise NotCoveredError(MSG_WIDTH)
    return [value.with_array(bind(equation, value.array))]


@padding_rule("optimization_barrier")
def barrier(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """The operands as they are, computed together."""
    arrays = equation.primitive.bind(*(value.array for value in values), **equation.params)
    return [value.with_array(array) for value, array in zip(values, arrays, strict=True)]


@padding_rule("dim_as_value")
def size_as_value(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """A size as a number: the length itself, not the bound."""
    number = symbolic_sizes.evaluate(equation.params["dim"], frame.lengths)
    dtype = equation.outvars[0].aval.dtype
    return [as_padded(jnp.asarray(number).astype(dtype))]


@padding_rule("iota")
def iota(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """0, 1, ... along one dimension."""
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
    """The bits that an array of the length itself would have: each depends on its element's number."""
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
