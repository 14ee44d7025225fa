"""Comparisons, logical and bitwise operators, selection, casts and copies."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import (
    Scalar,
    broadcast_to,
    convert,
    is_complex,
    is_float,
    is_nan,
    output_dtype,
    output_shape,
    pair,
    present,
    scalar,
    where,
)
from xla_core.operators.lowering_registry import Promotion, RuleContext, rule

# Comparisons are made in the operands' own dtype: a scalar is rounded to it first.
NO_OPMATH = Promotion.NO_OPMATH
BINARY_KINDS = ("Tensor", "Scalar", "Scalar_Tensor", "Tensor_Scalar")

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
}

BITWISE: dict[str, Callable[[Array, Array], Array]] = {
    "bitwise_and": lax.bitwise_and,
    "bitwise_or": lax.bitwise_or,
    "bitwise_xor": lax.bitwise_xor,
    "bitwise_left_shift": lax.shift_left,
}


def _register() -> None:
    for name, operation in COMPARISONS.items():
        overloads = present(f"{name}.Tensor", f"{name}.Scalar")
        rule(*overloads, promotion=NO_OPMATH, lift=("other",))(pair(operation))
    for name, operation in BITWISE.items():
        overloads = present(*(f"{name}.{kind}" for kind in BINARY_KINDS))
        rule(*overloads, promotion=NO_OPMATH)(pair(operation))


_register()


def shift_right(self: Array, other: Array) -> Array:
    """``self >> other``, filling with the sign."""
    signed = jnp.issubdtype(self.dtype, jnp.signedinteger)
    return pair(lax.shift_right_arithmetic if signed else lax.shift_right_logical)(self, other)


rule(
    *present(*(f"bitwise_right_shift.{kind}" for kind in BINARY_KINDS)),
    *present("__rshift__.Tensor", "__rshift__.Scalar"),
    promotion=NO_OPMATH,
)(shift_right)


@rule(*present("__lshift__.Tensor", "__lshift__.Scalar"), promotion=NO_OPMATH)
def shift_left(self: Array, other: Array) -> Array:
    """``self << other``; 0 once everything is shifted out."""
    return pair(lax.shift_left)(self, other)


@rule(*present("bitwise_not"))
def bitwise_not(self: Array) -> Array:
    """Every bit inverted; for bool the logical not."""
    return lax.bitwise_not(self)


def truth(value: Array) -> Array:
    """Whether each element is not zero (NaN is true)."""
    return value if value.dtype == np.bool_ else value != 0


@rule(*present("logical_and"))
def logical_and(self: Array, other: Array) -> Array:
    """Whether both are not zero."""
    return truth(self) & truth(other)


@rule(*present("logical_or"))
def logical_or(self: Array, other: Array) -> Array:
    """Whether one of them is not zero."""
    return truth(self) | truth(other)


@rule(*present("logical_xor"))
def logical_xor(self: Array, other: Array) -> Array:
    """Whether exactly one of them is not zero."""
    return truth(self) ^ truth(other)


@rule(*present("logical_not"))
def logical_not(self: Array) -> Array:
    """Whether each element is zero."""
    return ~truth(self)


@rule(
    *present("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"),
    lift=("self", "other"),
    context=True,
)
def select(context: RuleContext, condition: Array, self: Array, other: Array) -> Array:
    """``self`` where ``condition`` holds, else ``other``; ``condition`` may be uint8."""
    dtype = output_dtype(context)
    return where(truth(condition), scalar(self, dtype), scalar(other, dtype))


@rule(*present("masked_fill.Scalar", "masked_fill.Tensor"), lift=("value",))
def masked_fill(self: Array, mask: Array, value: Scalar) -> Array:
    """``self`` with ``value`` where ``mask`` holds."""
    return where(truth(mask), scalar(value, self.dtype), self)


@rule(*present("isclose"))
def isclose(
    self: Array, other: Array, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Array:
    """Whether ``|self - other| <= atol + rtol |other|``, equal infinities included."""
    close = self == other
    if is_float(self.dtype) or is_complex(self.dtype):
        allowed = atol + lax.abs(other) * rtol
        error = lax.abs(self - other)
        close |= lax.is_finite(error) & (error <= allowed)
        close |= (is_nan(self) & is_nan(other)) if equal_nan else False
    return close


@rule(*present("_to_copy", "to.dtype"), context=True)
def to_copy(context: RuleContext, self: Array, *_dtype: object, **options: object) -> Array:
    """``self`` cast to the promised dtype."""
    return convert(self, output_dtype(context))


@rule(*present("clone", "lift_fresh_copy"))
def clone(self: Array) -> Array:
    """The same value."""
    return self


@rule(*present("copy"), context=True)
def copy(context: RuleContext, self: Array, src: Array) -> Array:
    """``src``, cast and broadcast to ``self``."""
    return broadcast_to(convert(src, output_dtype(context)), output_shape(context))


@rule(*present("fill.Scalar", "fill.Tensor"), lift=("value",), context=True)
def fill(context: RuleContext, self: Array, value: Scalar) -> Array:
    """``value`` in the shape and dtype of ``self``."""
    return broadcast_to(convert(jnp.asarray(value), self.dtype), self.shape)


@rule(*present("zero"))
def zero(self: Array) -> Array:
    """Zeros in the shape and dtype of ``self``."""
    return jnp.zeros(self.shape, self.dtype)
