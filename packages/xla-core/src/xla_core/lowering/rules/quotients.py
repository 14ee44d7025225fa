"""Division as PyTorch's CPU does it: correctly rounded, and of complex numbers without overflow on the way."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from xla_core.lowering.rules.common import broadcast_to, is_complex, is_float, is_nan, where

__all__ = ["complex_reciprocal", "quotient"]


def quotient(left: Array, right: Array) -> Array:
    """``left / right`` of one dtype, broadcast; integers are divided towards zero."""
    if is_complex(left.dtype):
        return _complex_quotient(left, right)
    shape = jnp.broadcast_shapes(left.shape, right.shape)
    left, right = broadcast_to(left, shape), broadcast_to(right, shape)
    return _exact(left, right) if is_float(left.dtype) else lax.div(left, right)


def _exact(left: Array, right: Array) -> Array:
    """``left / right`` of floats of one shape, correctly rounded.

    XLA multiplies by the reciprocal of a divisor that is broadcast. That product is off by one in the
    last place for a third of all quotients, so that ``x / x`` can be below 1, and the reciprocal of a number
    near the largest is subnormal, which counts as 0. A divisor that the dividend chooses (NaN divides NaN)
    is no broadcast.
    """
    if left.size == 1:
        return lax.div(left, right)
    return lax.div(left, where(is_nan(left), left, right))


def _complex_quotient(left: Array, right: Array) -> Array:
    """Smith's algorithm, as ``c10::complex`` has it: the divisor's larger part is divided by first."""
    shape = jnp.broadcast_shapes(left.shape, right.shape)
    left, lift_of_left = _lifted(broadcast_to(left, shape))
    right, lift_of_right = _lifted(broadcast_to(right, shape))
    lowered = lift_of_right / lift_of_left
    a, b, c, d = lax.real(left), lax.imag(left), lax.real(right), lax.imag(right)
    real_is_larger = lax.abs(c) >= lax.abs(d)
    large, small = where(real_is_larger, c, d), where(real_is_larger, d, c)
    ratio = quotient(small, large)
    divisor = large + small * ratio
    # a ratio that is subnormal counts as 0
    lost = (ratio == 0) & (small != 0) & (lax.abs(small) < 1)

    def by_ratio(part: Array) -> Array:
        return where(lost, quotient(small * part, large), part * ratio)

    one, other = by_ratio(a), by_ratio(b)
    real = where(real_is_larger, a + other, one + b)
    imag = where(real_is_larger, b - one, other - a)
    result = lax.complex(quotient(real, divisor) * lowered, quotient(imag, divisor) * lowered)
    by_zero = lax.complex(quotient(a, lax.abs(c)), quotient(b, lax.abs(d)))
    return where((c == 0) & (d == 0), by_zero, result)


def _lifted(value: Array) -> tuple[Array, Array]:
    """``value`` times a power of two where it is so small that products on the way are subnormal, and that power.

    jaxlib 0.10.2 keeps them, because it fuses the multiplication with the addition that follows; 0.11 does not.
    """
    limits = jnp.finfo(value.dtype)
    lift = 2.0 ** (limits.nmant + 1)
    real, imag = lax.real(value), lax.imag(value)
    is_small = lax.max(lax.abs(real), lax.abs(imag)) < float(limits.tiny) * lift * lift
    factor = where(is_small, lift, jnp.ones_like(real))
    return lax.complex(real * factor, imag * factor), factor


def complex_reciprocal(value: Array) -> Array:
    """``1 / value`` of complex numbers."""
    return _complex_quotient(jnp.ones_like(value), value)
