"""Element-wise functions of one operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules import complex_functions, special
from xla_core.lowering.rules.arithmetic import clip
from xla_core.lowering.rules.common import (
    Scalar,
    is_complex,
    is_float,
    is_nan,
    opmath,
    output_dtype,
    present,
    where,
)
from xla_core.operators.lowering_registry import Promotion, RuleContext, rule

DEFAULT = Promotion.DEFAULT
INT_TO_FLOAT = Promotion.INT_TO_FLOAT
LN_2: Final = 0.6931471805599453
LN_10: Final = 2.302585092994046
PI: Final = 3.141592653589793


def exp2(x: Array) -> Array:
    """``2 ** x``."""
    return lax.exp2(x)


def log2(x: Array) -> Array:
    """The logarithm to base 2, exact for powers of two."""
    return jnp.log2(x)


def log10(x: Array) -> Array:
    """The logarithm to base 10."""
    return lax.log(x) / LN_10


def sinc(x: Array) -> Array:
    """``sin(pi x) / (pi x)``, and 1 at 0."""
    scaled = x * PI
    safe = where(x == 0, 1, scaled)
    return where(x == 0, 1, lax.sin(safe) / safe)


def trunc(x: Array) -> Array:
    """``x`` rounded towards zero."""
    return lax.sign(x) * lax.floor(lax.abs(x))


def round_half_even(x: Array) -> Array:
    """``x`` rounded to the nearest integer, ties to even."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def frac(x: Array) -> Array:
    """What ``trunc`` takes away."""
    return x - trunc(x)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``."""
    return lax.logistic(x)


def reciprocal(x: Array) -> Array:
    """``1 / x``."""
    return 1 / x


def digamma(x: Array) -> Array:
    """The logarithmic derivative of the gamma function, infinite at 0 as the CPU gives."""
    pole = where(jnp.signbit(x), np.inf, jnp.full_like(x, -np.inf))
    return where(x == 0, pole, lax.digamma(x))


def angle(x: Array) -> Array:
    """The argument of a complex number; 0 or pi for a real one, NaN for NaN."""
    if is_complex(x.dtype):
        return lax.atan2(lax.imag(x), lax.real(x))
    return where(is_nan(x), x, where(x < 0, PI, jnp.zeros_like(x)))


def erfcx(x: Array) -> Array:
    """``exp(x**2) * erfc(x)``; overflows where PyTorch's scaled series does not (x above 9)."""
    return lax.exp(x * x) * lax.erfc(x)


def entropy(x: Array) -> Array:
    """``-x log x``; 0 at 0 and minus infinity below."""
    positive = -x * lax.log(where(x > 0, x, 1))
    value = where(x > 0, positive, where(x == 0, 0, jnp.full_like(x, -jnp.inf)))
    return where(is_nan(x), x, value)


def modified_bessel_i1(x: Array) -> Array:
    """The modified Bessel function of the first kind and order 1."""
    return lax.exp(lax.abs(x)) * lax.bessel_i1e(x)


# Functions of floating-point numbers: an integer operand becomes a float first.
FLOAT_FUNCTIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "acos": lax.acos,
    "acosh": lax.acosh,
    "angle": angle,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "cos": lax.cos,
    "cosh": lax.cosh,
    "deg2rad": lambda x: x * (PI / 180),
    "digamma": digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": lax.exp,
    "exp2": exp2,
    "expm1": lax.expm1,
    "i0": jsp.i0,
    "lgamma": special.log_gamma,
    "log": lax.log,
    "log10": log10,
    "log1p": lax.log1p,
    "log2": log2,
    "rad2deg": lambda x: x * (180 / PI),
    "reciprocal": reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": sigmoid,
    "sin": lax.sin,
    "sinc": sinc,
    "sinh": lax.sinh,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
    "special_entr": entropy,
    "special_i0e": lax.bessel_i0e,
    "special_i1": modified_bessel_i1,
    "special_i1e": lax.bessel_i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_modified_bessel_i0": jsp.i0,
    "special_modified_bessel_i1": modified_bessel_i1,
    "special_ndtri": jsp.ndtri,
}

# Rounding keeps integers as they are.
ROUNDING_FUNCTIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "ceil": lax.ceil,
    "floor": lax.floor,
    "frac": frac,
    "round": round_half_even,
    "trunc": trunc,
}


def _rounding(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def keep_integers(self: Array) -> Array:
        return function(self) if is_float(self.dtype) else self

    return keep_integers


def _register() -> None:
    for name, function in FLOAT_FUNCTIONS.items():
        if name in complex_functions.FUNCTIONS:
            function = complex_functions.by_dtype(function, complex_functions.FUNCTIONS[name])
        rule(*present(name), promotion=INT_TO_FLOAT)(function)
    for name, function in ROUNDING_FUNCTIONS.items():
        rule(*present(name), promotion=DEFAULT)(_rounding(function))


_register()


@rule(*present("abs"), promotion=Promotion.COMPLEX_TO_FLOAT)
def absolute(self: Array) -> Array:
    """The absolute value; unsigned integers and bool are their own."""
    if is_complex(self.dtype):
        return complex_functions.absolute(self)
    return (
        self
        if jnp.issubdtype(self.dtype, jnp.unsignedinteger) or self.dtype == np.bool_
        else lax.abs(self)
    )


@rule(*present("neg"), promotion=Promotion.NO_OPMATH)
def neg(self: Array) -> Array:
    """``-self``; unsigned integers wrap around."""
    return lax.neg(self)


@rule(*present("sign"), promotion=DEFAULT)
def sign(self: Array) -> Array:
    """-1, 0 or 1; 0 for NaN, as the CPU gives."""
    if self.dtype == np.bool_:
        return self
    if is_float(self.dtype):
        return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)
    return lax.sign(self)


@rule(*present("sgn"), promotion=DEFAULT)
def sgn(self: Array) -> Array:
    """``sign`` for real numbers, ``self / abs(self)`` for complex ones (0 at 0)."""
    if not is_complex(self.dtype):
        return sign(self)
    size = complex_functions.absolute(self)
    divisor = where(size == 0, 1, size)
    result = lax.complex(lax.real(self) / divisor, lax.imag(self) / divisor)
    return where(size == 0, jnp.zeros_like(self), result)


@rule(*present("round.decimals"), promotion=DEFAULT)
def round_decimals(self: Array, *, decimals: int) -> Array:
    """``self`` rounded to ``decimals`` digits after the point (before it if negative)."""
    if not is_float(self.dtype):
        return self
    power = self.dtype.type(10.0 ** abs(decimals))
    if decimals < 0:
        return round_half_even(self / power) * power
    return round_half_even(self * power) / power


@rule(*present("logit"), promotion=INT_TO_FLOAT, context=True)
def logit(context: RuleContext, self: Array, eps: float | None = None) -> Array:
    """``log(x / (1 - x))`` of ``self`` limited to ``[eps, 1 - eps]``."""
    limited = self if eps is None else clip(self, eps, 1 - eps)
    return lax.log(limited / (1 - limited))


@rule(*present("signbit"))
def signbit(self: Array) -> Array:
    """Whether the sign bit is set: true for -0.0."""
    return jnp.signbit(self) if is_float(self.dtype) else _negative(self)


def _negative(self: Array) -> Array:
    if jnp.issubdtype(self.dtype, jnp.signedinteger):
        return self < 0
    return jnp.zeros(self.shape, np.bool_)


@rule(*present("isnan"))
def isnan(self: Array) -> Array:
    """Whether each element is NaN."""
    return is_nan(self)


@rule(*present("isinf"))
def isinf(self: Array) -> Array:
    """Whether each element is plus or minus infinity."""
    if is_complex(self.dtype):
        return isinf(lax.real(self)) | isinf(lax.imag(self))
    if not is_float(self.dtype):
        return jnp.zeros(self.shape, np.bool_)
    return lax.abs(self) == self.dtype.type(np.inf)


@rule(*present("isfinite"))
def isfinite(self: Array) -> Array:
    """Whether each element is neither NaN nor infinite."""
    if is_complex(self.dtype):
        return lax.is_finite(lax.real(self)) & lax.is_finite(lax.imag(self))
    return lax.is_finite(self) if is_float(self.dtype) else jnp.ones(self.shape, np.bool_)


@rule(*present("isposinf"))
def isposinf(self: Array) -> Array:
    """Whether each element is plus infinity."""
    return isinf(self) & (self > 0) if is_float(self.dtype) else isinf(self)


@rule(*present("isneginf"))
def isneginf(self: Array) -> Array:
    """Whether each element is minus infinity."""
    return isinf(self) & (self < 0) if is_float(self.dtype) else isinf(self)


@rule(*present("nan_to_num"))
def nan_to_num(
    self: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """NaN and infinities replaced, by default with 0 and the dtype's finite limits."""
    if is_complex(self.dtype):
        parts = (nan_to_num(part, nan, posinf, neginf) for part in (lax.real(self), lax.imag(self)))
        return lax.complex(*parts)
    if not is_float(self.dtype):
        return self
    limits = jnp.finfo(self.dtype)
    infinity = self.dtype.type(np.inf)
    result = where(is_nan(self), 0.0 if nan is None else nan, self)
    result = where(self == infinity, float(limits.max) if posinf is None else posinf, result)
    return where(self == -infinity, float(limits.min) if neginf is None else neginf, result)


@rule(*present("conj_physical", "_conj_physical"))
def conj_physical(self: Array) -> Array:
    """The complex conjugate, as a new value."""
    return lax.conj(self) if is_complex(self.dtype) else self


@rule(*present("complex"), promotion=Promotion.NO_OPMATH)
def make_complex(real: Array, imag: Array) -> Array:
    """The complex number with these parts."""
    shape = jnp.broadcast_shapes(real.shape, imag.shape)
    real, imag = opmath(real), opmath(imag)  # float16 makes complex32
    return lax.complex(jnp.broadcast_to(real, shape), jnp.broadcast_to(imag, shape))


@rule(*present("polar"))
def polar(magnitude: Array, angle: Array) -> Array:
    """The complex number with this absolute value and argument."""
    return make_complex(magnitude * lax.cos(angle), magnitude * lax.sin(angle))


@rule(*present("polygamma"), context=True)
def polygamma(context: RuleContext, n: int, self: Array) -> Array:
    """The ``n``-th derivative of the digamma function."""
    x = opmath(self.astype(output_dtype(context)))
    return digamma(x) if n == 0 else special.polygamma(n, x)


@rule(*present("polygamma_"), context=True)
def polygamma_in_place(context: RuleContext, self: Array, n: int) -> Array:
    """The same; in place the operator's arguments stand in another order."""
    return polygamma(context, n, self)


@rule(*present("mvlgamma"), context=True)
def mvlgamma(context: RuleContext, self: Array, p: int) -> Array:
    """The logarithm of the multivariate gamma function of dimension ``p``."""
    x = opmath(self.astype(output_dtype(context)))
    total: Scalar = p * (p - 1) / 4 * np.log(PI)
    for index in range(p):
        total = total + special.log_gamma(x - index / 2)
    return total
