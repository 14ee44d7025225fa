"""Element-wise arithmetic with two or more operands, and clamping."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules import complex_functions
from xla_core.lowering.rules.common import (
    Scalar,
    aten,
    is_complex,
    is_float,
    is_integer,
    is_nan,
    is_one,
    opmath,
    output_dtype,
    pair,
    present,
    scalar,
    where,
)
from xla_core.lowering.rules.quotients import complex_reciprocal, quotient
from xla_core.operators.lowering_registry import Promotion, RuleContext, rule

DEFAULT = Promotion.DEFAULT
INT_TO_FLOAT = Promotion.INT_TO_FLOAT


def _either(
    direct: Callable[[Array, Array], Array], general: Callable[[Array, Array], Array]
) -> Callable[[Array, Array], Array]:
    """``general``, and where that only calls ``direct``, that: jax takes half the time to trace it."""

    def of_two(left: Array, right: Array) -> Array:
        alike = left.shape == right.shape or not left.shape or not right.shape
        if alike and left.dtype == right.dtype != np.bool_:
            return direct(left, right)
        return general(left, right)

    return of_two


_plus = _either(lax.add, operator.add)
_minus = _either(lax.sub, operator.sub)
_times = _either(lax.mul, operator.mul)


def _scaled(value: Array, factor: Scalar) -> Array:
    return value if is_one(factor) else _times(value, scalar(factor, value.dtype))


@rule(*present("add.Tensor", "add.Scalar"), promotion=DEFAULT, lift=("other", "alpha"), exact=True)
def add(self: Array, other: Array, alpha: Scalar = 1) -> Array:
    """``self + alpha * other``; for bool it is a logical or."""
    return _plus(self, _scaled(other, alpha))


@rule(*present("sub.Tensor", "sub.Scalar"), promotion=DEFAULT, lift=("other", "alpha"), exact=True)
def sub(self: Array, other: Array, alpha: Scalar = 1) -> Array:
    """``self - alpha * other``."""
    return _minus(self, _scaled(other, alpha))


@rule(
    *present("rsub.Tensor", "rsub.Scalar"), promotion=DEFAULT, lift=("other", "alpha"), exact=True
)
def rsub(self: Array, other: Array, alpha: Scalar = 1) -> Array:
    """``other - alpha * self``."""
    return _minus(other, _scaled(self, alpha))


@rule(*present("mul.Tensor", "mul.Scalar"), promotion=DEFAULT, lift=("other",), exact=True)
def mul(self: Array, other: Array) -> Array:
    """``self * other``; for bool it is a logical and."""
    return _times(self, other)


@rule(*present("div.Tensor", "div.Scalar"), promotion=INT_TO_FLOAT, lift=("other",))
def true_divide(self: Array, other: Array) -> Array:
    """``self / other`` in floating point, for integers too."""
    return quotient(self, other)


@rule(
    *present("div.Tensor_mode", "div.Scalar_mode"), promotion=DEFAULT, lift=("other",), context=True
)
def divide_mode(
    context: RuleContext, self: Array, other: Array, *, rounding_mode: str | None
) -> Array:
    """``self / other``, rounded by ``rounding_mode``: None, ``"trunc"`` or ``"floor"``."""
    if rounding_mode is None:
        dtype = np.promote_types(output_dtype(context), np.float32)
        if is_float(self.dtype) or is_complex(self.dtype):
            dtype = self.dtype
        return quotient(self.astype(dtype), other.astype(dtype))
    if rounding_mode == "floor":
        return floor_quotient(self, other)
    result = quotient(self, other)
    return _truncate(_rounded(result, output_dtype(context))) if is_float(result.dtype) else result


@rule(*present("floor_divide", "floor_divide.Scalar"), promotion=DEFAULT, lift=("other",))
def floor_divide(self: Array, other: Array) -> Array:
    """``self / other`` rounded towards minus infinity."""
    return floor_quotient(self, other)


def _rounded(value: Array, dtype: np.dtype) -> Array:
    """``value`` with the digits that ``dtype`` has: PyTorch rounds a quotient before it truncates it."""
    if value.dtype == dtype or not is_float(dtype):
        return value
    limits = jnp.finfo(dtype)
    return lax.reduce_precision(value, limits.nexp, limits.nmant)


def _truncate(value: Array) -> Array:
    return where(value < 0, lax.ceil(value), lax.floor(value))


def _signs_differ(left: Array, right: Array) -> Array:
    return pair(lax.ne)(left < 0, right < 0)


def _floor_quotient_float(self: Array, other: Array) -> Array:
    """Exact floor division, from the remainder, as Python does it: 1 // 0.1 is 9, not 10."""
    remainder = pair(lax.rem)(self, other)
    whole = quotient(self - remainder, other)
    below = (remainder != 0) & _signs_differ(remainder, other)
    whole = where(below, whole - 1, whole)
    floor = lax.floor(whole)
    floor = where(whole - floor > 0.5, floor + 1, floor)
    true_quotient = quotient(self, other)
    signed_zero = jnp.copysign(jnp.zeros_like(floor), true_quotient)
    floor = where(whole == 0, signed_zero, floor)
    return where(other == 0, true_quotient, floor)


def floor_quotient(self: Array, other: Array) -> Array:
    """Division rounded towards minus infinity; a float divided by 0 gives inf or NaN."""
    if is_float(self.dtype):
        return _floor_quotient_float(self, other)
    whole = quotient(self, other)
    if not jnp.issubdtype(self.dtype, jnp.signedinteger):
        return whole
    inexact = pair(lax.rem)(self, other) != 0
    return where(inexact & _signs_differ(self, other), whole - 1, whole)


@rule(
    *present("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"),
    promotion=DEFAULT,
    lift=("self", "other"),
)
def remainder(self: Array, other: Array) -> Array:
    """The remainder with the sign of ``other`` (Python's ``%``)."""
    rest = pair(lax.rem)(self, other)
    if not is_float(rest.dtype) and not jnp.issubdtype(rest.dtype, jnp.signedinteger):
        return rest
    return where((rest != 0) & _signs_differ(rest, other), rest + other, rest)


@rule(*present("fmod.Tensor", "fmod.Scalar"), promotion=DEFAULT, lift=("other",))
def fmod(self: Array, other: Array) -> Array:
    """The remainder with the sign of ``self`` (C's ``fmod``)."""
    return pair(lax.rem)(self, other)


_STATIC_POWERS: dict[complex, Callable[[Array], Array]] = {
    0.5: lax.sqrt,
    -0.5: lax.rsqrt,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: (1 / x) * (1 / x),  # the square may be subnormal, which counts as 0
}
_STATIC_COMPLEX_POWERS: dict[complex, Callable[[Array], Array]] = {
    0.5: complex_functions.FUNCTIONS["sqrt"],
    -0.5: complex_functions.FUNCTIONS["rsqrt"],
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: complex_reciprocal,
    -2.0: complex_functions.inverse_square,
}


def static_power(base: Array, exponent: bool | int | float | complex) -> Array:
    """``base ** exponent`` for a constant, with the special cases of PyTorch's kernel."""
    if is_integer(base.dtype) or base.dtype == np.bool_:
        return _integer_power(base, jnp.asarray(exponent).astype(base.dtype))
    if exponent == 0:
        return jnp.ones_like(base)
    special = _static_powers(base.dtype).get(exponent)
    if special is not None:
        return special(base)
    return _power(base, scalar(exponent, base.dtype))


def _static_powers(dtype: np.dtype) -> Mapping[complex, Callable[[Array], Array]]:
    """The exponents with a form of their own; of a complex exponent too, if it has no imaginary part."""
    return _STATIC_COMPLEX_POWERS if is_complex(dtype) else _STATIC_POWERS


def _power(base: Array, exponent: Array) -> Array:
    """``base ** exponent``, not of integers."""
    return pair(complex_functions.power if is_complex(base.dtype) else lax.pow)(base, exponent)


def _power_by_squaring(base: Array, exponent: Array) -> Array:
    """``base ** exponent`` of whole numbers, wrapping around; numpy's form in jax looks at 6 bits of exponents."""
    base, exponent = jnp.broadcast_arrays(base, exponent)

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return jnp.any(state[2] > 0)

    def square(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        result, power, left = state
        return where(left & 1 == 1, result * power, result), power * power, left >> 1

    return lax.while_loop(unfinished, square, (jnp.ones_like(base), base, exponent))[0]


def _integer_power(base: Array, exponent: Array) -> Array:
    """Integer power, wrapping around; negative exponents truncate to 0 or ±1."""
    if base.dtype == np.bool_:
        return base | ~exponent
    result = _power_by_squaring(base, jnp.maximum(exponent, 0))
    if not jnp.issubdtype(base.dtype, jnp.signedinteger):
        return result
    alternating = where(exponent & 1 == 1, -1, jnp.ones_like(exponent))
    inverse = where(base == 1, 1, where(base == -1, alternating, jnp.zeros_like(base)))
    return where(exponent < 0, inverse, result)


@rule(aten.pow.Tensor_Tensor, promotion=DEFAULT)
def pow_tensor(self: Array, exponent: Array) -> Array:
    """``self ** exponent``."""
    if is_integer(self.dtype) or self.dtype == np.bool_:
        return _integer_power(self, exponent)
    return _power(self, exponent)


def _power_meta(self: torch.Tensor, exponent: Scalar) -> torch.Tensor:
    # torch 2.13: its own kernel makes int64 of ``bool ** True``
    return torch.empty_like(self, dtype=torch.result_type(self, exponent))


@rule(aten.pow.Tensor_Scalar, context=True, meta=_power_meta)
def pow_scalar(context: RuleContext, self: Array, exponent: Scalar) -> Array:
    """``self ** exponent`` for a constant exponent."""
    dtype = output_dtype(context)
    if dtype == np.float16 and exponent in (0.5, -0.5):
        # PyTorch's kernel has no roots of float16, and they differ from powers at -0 and minus infinity
        return pair(lax.pow)(opmath(self.astype(dtype)), scalar(exponent, np.dtype(np.float32)))
    return static_power(opmath(self.astype(dtype)), exponent)


@rule(aten.pow.Scalar, promotion=DEFAULT)
def pow_base(self: Array, exponent: Array) -> Array:
    """``self ** exponent`` for a constant base."""
    return pow_tensor(self, exponent)


@rule(*present("maximum"), promotion=Promotion.NO_OPMATH)
def maximum(self: Array, other: Array) -> Array:
    """The larger operand, NaN if either is NaN."""
    return pair(lax.max)(self, other)


@rule(*present("minimum"), promotion=Promotion.NO_OPMATH)
def minimum(self: Array, other: Array) -> Array:
    """The smaller operand, NaN if either is NaN."""
    return pair(lax.min)(self, other)


def _ignoring_nan(operation: Callable[[Array, Array], Array], left: Array, right: Array) -> Array:
    if is_float(left.dtype):
        left, right = where(is_nan(left), right, left), where(is_nan(right), left, right)
    return pair(operation)(left, right)


@rule(aten.fmax.default, promotion=Promotion.NO_OPMATH)
def fmax(self: Array, other: Array) -> Array:
    """The larger operand; NaN only if both are NaN."""
    return _ignoring_nan(lax.max, self, other)


@rule(aten.fmin.default, promotion=Promotion.NO_OPMATH)
def fmin(self: Array, other: Array) -> Array:
    """The smaller operand; NaN only if both are NaN."""
    return _ignoring_nan(lax.min, self, other)


def clip(value: Array, low: Scalar, high: Scalar) -> Array:
    """``min(max(value, low), high)``; NaN of any operand propagates; a None bound is no bound."""
    if low is not None:
        value = pair(lax.max)(value, jnp.asarray(low).astype(value.dtype))
    if high is not None:
        value = pair(lax.min)(value, jnp.asarray(high).astype(value.dtype))
    return value


@rule(
    *present("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor"),
    promotion=Promotion.NO_OPMATH,
    lift=("min", "max"),
)
def clamp(self: Array, min: Scalar | None = None, max: Scalar | None = None) -> Array:
    """``self`` limited to ``[min, max]``; ``max`` wins where the bounds cross."""
    return clip(self, min, max)


@rule(
    *present("clamp_max", "clamp_max.Tensor"),
    promotion=Promotion.NO_OPMATH,
    lift=("max",),
)
def clamp_max(self: Array, max: Scalar) -> Array:
    """``self`` limited from above."""
    return clip(self, None, max)
