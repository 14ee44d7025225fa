"""Functions of complex numbers with the values that C99 asks for at infinities, zeros and branch cuts.

XLA's own lose the sign of a zero part, which says on which side of a branch cut a number lies, overflow
where a square does, and give NaN for some infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import is_complex, is_nan, where
from xla_core.lowering.rules.quotients import complex_reciprocal

__all__ = [
    "FUNCTIONS",
    "absolute",
    "by_dtype",
    "exponential",
    "inverse_square",
    "logarithm",
    "power",
    "product",
]


def by_dtype(
    real: Callable[[Array], Array], of_complex: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """A function that is ``of_complex`` for complex arrays and ``real`` for others."""

    def either(x: Array) -> Array:
        return of_complex(x) if is_complex(x.dtype) else real(x)

    return either


def _is_infinite(value: Array) -> Array:
    return (lax.abs(lax.real(value)) == np.inf) | (lax.abs(lax.imag(value)) == np.inf)


def absolute(value: Array) -> Array:
    """The absolute value; an infinite part wins over NaN."""
    size = lax.abs(value)
    return where(_is_infinite(value), np.inf, size)


def logarithm(value: Array) -> Array:
    """The natural logarithm; an infinite part wins over NaN."""
    log = lax.log(value)
    return lax.complex(where(_is_infinite(value), np.inf, lax.real(log)), lax.imag(log))


def exponential(value: Array) -> Array:
    """``e ** value``; it is 0 at minus infinity, whatever the imaginary part is."""
    real, imag = lax.real(value), lax.imag(value)
    result = lax.exp(value)
    no_angle = is_nan(imag) | (lax.abs(imag) == np.inf)
    endless = where(real == np.inf, np.inf, jnp.zeros_like(real))
    odd = where(real == np.inf, np.nan, jnp.zeros_like(real))
    at_infinity = lax.complex(endless, odd)
    result = where((lax.abs(real) == np.inf) & no_angle, at_infinity, result)
    level = lax.complex(lax.exp(real), imag)
    return where(imag == 0, level, result)


def _without_nan(value: Array) -> Array:
    """Each part: 0 with its sign if it is NaN."""

    def part(number: Array) -> Array:
        return where(is_nan(number), jnp.copysign(jnp.zeros_like(number), number), number)

    return lax.complex(part(lax.real(value)), part(lax.imag(value)))


def _boxed(value: Array) -> Array:
    """Each part of an infinite number: 1 where it is infinite, else 0, with its sign."""

    def part(number: Array) -> Array:
        return jnp.copysign((lax.abs(number) == np.inf).astype(number.dtype), number)

    return lax.complex(part(lax.real(value)), part(lax.imag(value)))


def _plain_product(left: Array, right: Array) -> Array:
    a, b, c, d = lax.real(left), lax.imag(left), lax.real(right), lax.imag(right)
    return lax.complex(a * c - b * d, a * d + b * c)


def product(left: Array, right: Array) -> Array:
    """``left * right`` of one shape; what is infinite stays so, as C99's annex G has it."""
    result = _plain_product(left, right)
    lost = is_nan(lax.real(result)) & is_nan(lax.imag(result))
    left_infinite, right_infinite = _is_infinite(left), _is_infinite(right)
    one = where(left_infinite, _boxed(left), left)
    other = where(right_infinite, _boxed(right), right)
    one = where(right_infinite & ~left_infinite, _without_nan(left), one)
    other = where(left_infinite & ~right_infinite, _without_nan(right), other)
    direction = _plain_product(one, other)
    infinity = np.array(np.inf, lax.real(result).dtype)
    endless = lax.complex(infinity * lax.real(direction), infinity * lax.imag(direction))
    return where(lost & (left_infinite | right_infinite), endless, result)


def power(base: Array, exponent: Array) -> Array:
    """``base ** exponent`` of one shape: ``exp(exponent * log(base))``, as the C library computes it."""
    return exponential(product(exponent, logarithm(base)))


_SMALL: Final = 2.0**-60
_LIFT: Final = 2.0**60


def _square_root(value: Array) -> Array:
    """The square root, whose imaginary part has the sign of ``value``'s, of zeros too."""
    real, imag = lax.real(value), lax.imag(value)
    small = (lax.abs(real) < _SMALL) & (lax.abs(imag) < _SMALL)
    lifted = lax.complex(where(small, real * _LIFT, real), where(small, imag * _LIFT, imag))
    root = lax.sqrt(lifted)
    back = where(small, _LIFT**-0.5, jnp.ones_like(real))
    endless = lax.abs(imag) == np.inf
    real = where(endless, np.inf, lax.real(root) * back)
    size = where(endless, np.inf, lax.abs(lax.imag(root)) * back)
    size = where(lax.real(value) == -np.inf, np.inf, size)
    real = where(lax.real(value) == np.inf, np.inf, real)
    return lax.complex(real, jnp.copysign(size, imag))


def _beside_nan(value: Array, result: Array) -> Array:
    """``result``; NaN where one part of ``value`` is NaN and the other is finite."""
    real, imag = lax.real(value), lax.imag(value)
    lost = (is_nan(real) & lax.is_finite(imag)) | (is_nan(imag) & lax.is_finite(real))
    return where(lost, complex(np.nan, np.nan), result)


def _at_nan(
    function: Callable[[Array], Array], real: float, imag: float
) -> Callable[[Array], Array]:
    """``function`` with the values of NaN: ``real`` and ``imag`` where the real part is 0, else NaN."""

    def with_nan(value: Array) -> Array:
        result = _beside_nan(value, function(value))
        on_axis = (lax.real(value) == 0) & is_nan(lax.imag(value))
        return where(on_axis, complex(real, imag), result)

    return with_nan


def _signed(function: Callable[[Array], Array], real: bool, imag: int) -> Callable[[Array], Array]:
    """``function`` with the signs of the argument's parts: of the real one if ``real``, of the imaginary
    one times ``imag``.
    """

    def with_signs(value: Array) -> Array:
        result = function(value)
        real_part, imag_part = lax.real(result), lax.imag(result)
        if real:
            real_part = jnp.copysign(real_part, lax.real(value))
        return lax.complex(real_part, jnp.copysign(imag_part, imag * lax.imag(value)))

    return with_signs


def _turned(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``-i * function(i * value)``: of an odd hyperbolic function the circular one."""

    def turned(value: Array) -> Array:
        result = function(lax.complex(-lax.imag(value), lax.real(value)))
        return lax.complex(lax.imag(result), -lax.real(result))

    return turned


def _sine_and_cosine(angle: Array) -> tuple[Array, Array]:
    return lax.sin(angle), lax.cos(angle)


def _hyperbolic_sine(value: Array) -> Array:
    """``sinh(x) * cos(y) + i * cosh(x) * sin(y)``: XLA's own subtracts exponentials, which cancel near 0."""
    real, imag = lax.real(value), lax.imag(value)
    finite = _finite_sine(value)
    sine, cosine = _sine_and_cosine(imag)
    endless = lax.abs(real) == np.inf
    no_angle = ~lax.is_finite(imag)
    size = where(endless, real * where(no_angle, 1, cosine), lax.real(finite))
    size = where((imag == 0) & endless, real, size)
    size = where(real == 0, real * where(no_angle, 1, cosine), size)
    turn = where(endless, np.inf * sine, lax.imag(finite))
    return lax.complex(size, where(imag == 0, imag, turn))


def _finite_sine(value: Array) -> Array:
    sine = lax.sin(lax.complex(-lax.imag(value), lax.real(value)))
    return lax.complex(lax.imag(sine), -lax.real(sine))


def _hyperbolic_cosine(value: Array) -> Array:
    """``cosh(x) * cos(y) + i * sinh(x) * sin(y)``; 0 times an infinite number is 0 of the product's sign."""
    real, imag = lax.real(value), lax.imag(value)
    finite = lax.cosh(value)
    sine, cosine = _sine_and_cosine(imag)
    endless = lax.abs(real) == np.inf
    no_angle = ~lax.is_finite(imag)
    size = where(endless, np.inf * where(no_angle | (imag == 0), 1, cosine), lax.real(finite))
    turn = where(endless, real * sine, lax.imag(finite))
    level = jnp.copysign(jnp.zeros_like(real), real) * jnp.copysign(jnp.ones_like(imag), imag)
    turn = where(imag == 0, level, turn)
    turn = where(real == 0, jnp.copysign(real, where(no_angle, real, real * sine)), turn)
    return lax.complex(size, turn)


def _cosine(value: Array) -> Array:
    """``cosh(i * value)``."""
    return _hyperbolic_cosine(lax.complex(-lax.imag(value), lax.real(value)))


def _hyperbolic_tangent(value: Array) -> Array:
    """``tanh``; at infinite real parts 1 with their sign, beside it 0 with the sign of ``sin(2y)``."""
    real, imag = lax.real(value), lax.imag(value)
    finite = lax.tanh(value)
    sine, cosine = _sine_and_cosine(imag)
    endless = lax.abs(real) == np.inf
    size = where(endless, jnp.ones_like(real), lax.real(finite))
    size = where(real == 0, jnp.zeros_like(real), jnp.abs(size))
    beside = jnp.copysign(jnp.zeros_like(imag), where(lax.is_finite(imag), sine * cosine, imag))
    turn = where(endless, beside, lax.imag(finite))
    return lax.complex(jnp.copysign(size, real), where(imag == 0, imag, turn))


def _scaled_logarithm(base: float) -> Callable[[Array], Array]:
    def log(value: Array) -> Array:
        natural = logarithm(value)
        factor = lax.real(natural).dtype.type(1 / np.log(base))
        return lax.complex(lax.real(natural) * factor, lax.imag(natural) * factor)

    return log


def _exponential_2(value: Array) -> Array:
    factor = lax.real(value).dtype.type(np.log(2))
    return exponential(lax.complex(lax.real(value) * factor, lax.imag(value) * factor))


def _area_tangent(value: Array) -> Array:
    """The inverse hyperbolic tangent; beside its poles the square of the distance is subnormal."""
    real, imag = lax.real(value), lax.imag(value)
    result = lax.atanh(value)
    beside = (lax.abs(real) == 1) & (lax.abs(imag) < _SMALL)
    size = where(beside, (math.log(2.0) - lax.log(lax.abs(imag))) / 2, lax.real(result))
    result = _beside_nan(value, lax.complex(size, lax.imag(result)))
    real = where((real == 0) & is_nan(imag), real, lax.real(result))
    return lax.complex(real, where(is_nan(imag), np.nan, lax.imag(result)))


def _logarithm_of_next(value: Array) -> Array:
    """``log(1 + value)``; beside -1 the square of the distance is subnormal."""
    real, imag = lax.real(value), lax.imag(value)
    result = lax.log1p(value)
    size = where(real == -1, lax.log(lax.abs(imag)), lax.real(result))
    size = where((real == 0) & (imag == 0), real, size)
    return lax.complex(size, lax.imag(result))


def _exponential_less_1(value: Array) -> Array:
    """``exp(value) - 1``; real for real numbers, whose zero imaginary part keeps its sign."""
    real, imag = lax.real(value), lax.imag(value)
    result = lax.expm1(value)
    level = lax.complex(lax.expm1(real), imag)
    return where(imag == 0, level, result)


def _sigmoid(value: Array) -> Array:
    """``1 / (1 + exp(-value))``, which is 1 at infinity whatever the imaginary part is."""
    return where(lax.real(value) == np.inf, 1, lax.logistic(value))


def _area_sine(value: Array) -> Array:
    """``-i * asin(i * value)``."""
    turned = _at_nan(lax.asin, 0.0, np.nan)(lax.complex(-lax.imag(value), lax.real(value)))
    return lax.complex(lax.imag(turned), -lax.real(turned))


def inverse_square(value: Array) -> Array:
    """``value ** -2``; the square of a small number may be subnormal, of a large one infinite."""
    inverse = complex_reciprocal(value)
    square = inverse * inverse
    small = lax.max(lax.abs(lax.real(value)), lax.abs(lax.imag(value))) < 1
    finite = lax.is_finite(lax.real(square)) & lax.is_finite(lax.imag(square))
    return where(small & finite, square, complex_reciprocal(value * value))


FUNCTIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "acos": _signed(_at_nan(lax.acos, np.pi / 2, np.nan), real=False, imag=-1),
    "acosh": _signed(_at_nan(lax.acosh, np.nan, np.pi / 2), real=False, imag=1),
    "asin": _signed(_at_nan(lax.asin, 0.0, np.nan), real=True, imag=1),
    "asinh": _signed(_area_sine, real=True, imag=1),
    "atan": _signed(_turned(_area_tangent), real=True, imag=1),
    "atanh": _signed(_area_tangent, real=True, imag=1),
    "cos": _cosine,
    "cosh": _hyperbolic_cosine,
    "exp": exponential,
    "exp2": _exponential_2,
    "expm1": _exponential_less_1,
    "log": logarithm,
    "log1p": _logarithm_of_next,
    "log10": _scaled_logarithm(10.0),
    "log2": _scaled_logarithm(2.0),
    "reciprocal": complex_reciprocal,
    "rsqrt": lambda x: complex_reciprocal(_square_root(x)),
    "sigmoid": _sigmoid,
    "sin": _turned(_hyperbolic_sine),
    "sinh": _hyperbolic_sine,
    "sqrt": _square_root,
    "tan": _turned(_hyperbolic_tangent),
    "tanh": _hyperbolic_tangent,
}
"""By the names of PyTorch's operators."""
