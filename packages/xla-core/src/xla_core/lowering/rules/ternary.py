"""Element-wise functions of two and three operands beyond plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import (
    Scalar,
    is_complex,
    is_nan,
    is_one,
    pair,
    present,
    scalar,
    where,
)
from xla_core.lowering.rules.quotients import quotient
from xla_core.operators.lowering_registry import Promotion, rule

DEFAULT = Promotion.DEFAULT
INT_TO_FLOAT = Promotion.INT_TO_FLOAT


@rule(*present("atan2"), promotion=INT_TO_FLOAT)
def atan2(self: Array, other: Array) -> Array:
    """The angle of the point ``(other, self)``."""
    return pair(lax.atan2)(self, other)


@rule(*present("hypot"), promotion=DEFAULT)
def hypot(self: Array, other: Array) -> Array:
    """``sqrt(self**2 + other**2)`` without overflow."""
    left, right = lax.abs(self), lax.abs(other)
    large, small = pair(lax.max)(left, right), pair(lax.min)(left, right)
    ratio = small / where(large == 0, 1, large)
    value = large * lax.sqrt(1 + ratio * ratio)
    # An infinite side wins over NaN.
    return where((left == np.inf) | (right == np.inf), np.inf, value)


@rule(*present("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"), promotion=INT_TO_FLOAT)
def xlogy(self: Array, other: Array) -> Array:
    """``self * log(other)``, 0 where ``self`` is 0 and ``other`` is not NaN."""
    product = self * lax.log(other)
    return where(is_nan(other), other, where(self == 0, 0, product))


@rule(
    *present("special_xlog1py", "special_xlog1py.self_scalar", "special_xlog1py.other_scalar"),
    promotion=INT_TO_FLOAT,
)
def xlog1py(self: Array, other: Array) -> Array:
    """``self * log1p(other)``, 0 where ``self`` is 0 and ``other`` is not NaN."""
    product = self * lax.log1p(other)
    return where(is_nan(other), other, where(self == 0, 0, product))


def complex_log_add_exp(value: Array, total: Array) -> Array:
    """``log(exp(value) + exp(total))``: the larger plus a logarithm, whose angles PyTorch does not wrap."""
    smaller = where(lax.real(value) < lax.real(total), value, total)
    larger = where(lax.real(value) >= lax.real(total), value, total)
    low, high = lax.real(smaller), lax.real(larger)
    added = larger + jnp.log1p(jnp.exp(smaller - larger))
    same = ~jnp.isfinite(high) & (low == high)
    of_infinities = where(low < 0, smaller, jnp.log1p(jnp.exp(smaller) + jnp.exp(larger) - 1))
    missing = lax.complex(jnp.full_like(low, np.nan), jnp.full_like(low, np.nan))
    return where(is_nan(value) | is_nan(total), missing, where(same, of_infinities, added))


def _log_add(
    self: Array,
    other: Array,
    exponential: Callable[[Array], Array],
    log1p: Callable[[Array], Array],
) -> Array:
    largest = pair(lax.max)(self, other)
    value = largest + log1p(exponential(-lax.abs(self - other)))
    return where((self == other) & (lax.abs(self) == np.inf), self, value)


@rule(*present("logaddexp"), promotion=INT_TO_FLOAT)
def logaddexp(self: Array, other: Array) -> Array:
    """``log(exp(self) + exp(other))`` without overflow."""
    if is_complex(self.dtype):
        return complex_log_add_exp(self, other)
    return _log_add(self, other, lax.exp, lax.log1p)


@rule(*present("logaddexp2"), promotion=INT_TO_FLOAT)
def logaddexp2(self: Array, other: Array) -> Array:
    """``log2(2**self + 2**other)`` without overflow."""
    if is_complex(self.dtype):
        natural = np.log(2).astype(self.dtype)
        return complex_log_add_exp(self * natural, other * natural) / natural
    return _log_add(self, other, lax.exp2, lambda x: lax.log1p(x) / np.log(2).astype(x.dtype))


@rule(*present("copysign.Tensor", "copysign.Scalar"), promotion=INT_TO_FLOAT, lift=("other",))
def copysign(self: Array, other: Array) -> Array:
    """The size of ``self`` with the sign of ``other``, that of zeros included."""
    return where(jnp.signbit(other), -lax.abs(self), lax.abs(self))


@rule(*present("nextafter"), promotion=Promotion.NO_OPMATH)
def nextafter(self: Array, other: Array) -> Array:
    """The representable number after ``self`` in the direction of ``other``."""
    return pair(lax.nextafter)(self, other)


@rule(*present("heaviside"), promotion=Promotion.NO_OPMATH)
def heaviside(self: Array, values: Array) -> Array:
    """0 below zero, ``values`` at zero, 1 above (and 0 for NaN, as the CPU gives)."""
    return where(self == 0, values, (self > 0).astype(self.dtype))


@rule(*present("gcd"), promotion=Promotion.NO_OPMATH)
def gcd(self: Array, other: Array) -> Array:
    """The greatest common divisor."""

    # Step by step as the CPU: with the smallest number, which has no absolute value, jax's form never ends.
    def unfinished(state: tuple[Array, Array]) -> Array:
        return jnp.any(state[0] != 0)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        small, large = state
        done = small == 0
        rest = lax.rem(large, where(done, jnp.ones_like(small), small))
        return where(done, small, rest), where(done, large, small)

    small, large = jnp.broadcast_arrays(jnp.abs(self), jnp.abs(other))
    return lax.while_loop(unfinished, step, (small, large))[1]


@rule(*present("lcm"), promotion=Promotion.NO_OPMATH)
def lcm(self: Array, other: Array) -> Array:
    """The least common multiple."""
    divisor: Array = gcd(self, other)
    return where(
        divisor == 0,
        jnp.zeros_like(divisor),
        jnp.abs(pair(lax.div)(self, where(divisor == 0, jnp.ones_like(divisor), divisor)) * other),
    )


@rule(*present("igamma"), promotion=DEFAULT)
def igamma(self: Array, other: Array) -> Array:
    """The regularized lower incomplete gamma function."""
    return pair(lax.igamma)(self, other)


@rule(*present("igammac"), promotion=DEFAULT)
def igammac(self: Array, other: Array) -> Array:
    """The regularized upper incomplete gamma function."""
    return pair(lax.igammac)(self, other)


def interpolate(start: Array, end: Array, weight: Array) -> Array:
    """``start + weight * (end - start)``, from the nearer end so that weight 1 gives ``end``."""
    near = lax.abs(weight) < 0.5
    # choosing the numbers, not the results: an optimizer's scalar weight is chosen once
    return where(near, start, end) + (end - start) * where(near, weight, weight - 1)


@rule(*present("lerp.Scalar", "lerp.Tensor"), promotion=DEFAULT, lift=("weight",))
def lerp(self: Array, end: Array, weight: Array) -> Array:
    """Linear interpolation from ``self`` to ``end``."""
    return interpolate(self, end, weight)


def add_scaled(self: Array, term: Array, value: Scalar) -> Array:
    """``self + value * term``; nothing is emitted for a value of exactly 1."""
    return self + (term if is_one(value) else scalar(value, term.dtype) * term)


@rule(*present("addcmul"), promotion=DEFAULT, lift=("value",))
def addcmul(self: Array, tensor1: Array, tensor2: Array, *, value: Scalar = 1) -> Array:
    """``self + value * tensor1 * tensor2``."""
    return add_scaled(self, tensor1 * tensor2, value)


@rule(*present("addcdiv"), promotion=DEFAULT, lift=("value",))
def addcdiv(self: Array, tensor1: Array, tensor2: Array, *, value: Scalar = 1) -> Array:
    """``self + value * tensor1 / tensor2``."""
    scaled = tensor1 if is_one(value) else scalar(value, tensor1.dtype) * tensor1
    if tensor1.shape == tensor2.shape and not is_complex(self.dtype):
        return self + scaled / tensor2
    return self + quotient(scaled, tensor2)
