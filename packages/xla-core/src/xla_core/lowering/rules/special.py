"""Special functions that XLA has no, or no sufficiently accurate, operation for."""

from __future__ import annotations

import math
from typing import Final

import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import broadcast_to
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import Promotion, aten, rule

_EULER_GAMMA: Final = 0.5772156649015329

# Bernoulli numbers of even index from 2 on.
_BERNOULLI: Final = (
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510,
)  # fmt: skip
# Sums of this many terms leave a rest that the Euler-Maclaurin formula gives to float64 accuracy.
_HEAD: Final = 12.0


def hurwitz_zeta(x: Array, q: Array) -> Array:
    """The sum of ``(q + k) ** -x`` over all k from 0, for x above 1.

    Summed term by term until the base exceeds 12, the rest by the Euler-Maclaurin formula (DLMF
    25.11.5). XLA's own sums a fixed number of terms, which is not enough for negative ``q``.
    """
    shape = jnp.broadcast_shapes(x.shape, q.shape)
    x, q = broadcast_to(x, shape), broadcast_to(q, shape)
    # At a pole nothing is summed: far from 0, where each number is one, adding 1 has no end.
    start = select((q <= 0) & (q == jnp.floor(q)), 1, q)

    def unfinished(state: tuple[Array, Array]) -> Array:
        return jnp.any(state[1] < _HEAD)

    def add_term(state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, base = state
        early = base < _HEAD
        term = lax.pow(select(early, base, 1), -x)
        return total + select(early, term, 0), base + early.astype(base.dtype)

    total, base = lax.while_loop(unfinished, add_term, (jnp.zeros_like(q), start))
    power = lax.pow(base, -x)
    total = total + power * base / (x - 1) + 0.5 * power
    rising, power = x, power / base
    for index, number in enumerate(_BERNOULLI):
        total = total + number / math.factorial(2 * index + 2) * rising * power
        rising = rising * (x + 2 * index + 1) * (x + 2 * index + 2)
        power = power / (base * base)
    return _at_poles(total, x, q)


def _at_poles(value: Array, x: Array, q: Array) -> Array:
    infinite, nan = jnp.full_like(value, np.inf), jnp.full_like(value, np.nan)
    whole = q == jnp.floor(q)
    value = select((q < 0) & (x != jnp.floor(x)), nan, value)
    value = select((q <= 0) & whole, infinite, value)
    value = select(x < 1, nan, value)
    value = select(jnp.isposinf(q) & (x > 1), jnp.zeros_like(value), value)
    return select(x == 1, infinite, select(jnp.isnan(x) | jnp.isnan(q), nan, value))


@rule(
    aten.special_zeta.default,
    aten.special_zeta.self_scalar,
    aten.special_zeta.other_scalar,
    promotion=Promotion.INT_TO_FLOAT,
)
def zeta(self: Array, other: Array) -> Array:
    """The Hurwitz zeta function."""
    return hurwitz_zeta(self, other)


def polygamma(n: int, x: Array) -> Array:
    """The ``n``-th derivative of the digamma function, for n of at least 1."""
    if n == 1:
        return _trigamma(x)
    order = jnp.full_like(x, n + 1)
    return (-1) ** (n + 1) * math.factorial(n) * hurwitz_zeta(order, x)


def _trigamma(x: Array) -> Array:
    """The derivative of the digamma function; left of 1/2 by reflection, as the series would not converge."""
    left = x < 0.5
    series = hurwitz_zeta(jnp.full_like(x, 2), select(left, 1 - x, x))
    # As on the CPU the sine of a rounded multiple of pi makes the poles large numbers.
    sine = jnp.sin(jnp.asarray(math.pi, x.dtype) * x)
    return select(left, (math.pi / sine) ** 2 - series, series)


def _zeta_of_whole(k: int) -> float:
    """Riemann's zeta function: a head of its sum, and the rest by the Euler-Maclaurin formula."""
    head = sum(n**-k for n in range(int(_HEAD) - 1, 0, -1))
    total = head + _HEAD ** (1 - k) / (k - 1) + _HEAD**-k / 2
    rising, power = float(k), _HEAD ** (-k - 1)
    for index, number in enumerate(_BERNOULLI):
        total += number / math.factorial(2 * index + 2) * rising * power
        rising *= (k + 2 * index + 1) * (k + 2 * index + 2)
        power /= _HEAD * _HEAD
    return total


# The series of log_gamma(1 + z) from its second term on; the first is -Euler's constant times z.
_LOG_GAMMA_SERIES: Final = tuple((-1) ** k * _zeta_of_whole(k) / k for k in range(2, 34))
_NEAR_A_ZERO: Final = 0.35


def log_gamma(x: Array) -> Array:
    """``log(abs(gamma(x)))``, to a number's last digits beside its zeros 1 and 2, too.

    XLA's own has an absolute error there that is many times the result.
    """
    beside_two = x > 1.5
    z = x - select(beside_two, 2.0, jnp.ones_like(x))
    near = jnp.abs(z) < _NEAR_A_ZERO
    z = select(near, z, 0)
    series = jnp.zeros_like(z)
    for coefficient in reversed(_LOG_GAMMA_SERIES):
        series = (series + coefficient) * z
    value = z * (series - _EULER_GAMMA)
    value = value + select(beside_two, lax.log1p(z), 0)
    return select(near, value, lax.lgamma(x))


def log_ndtr(x: Array) -> Array:
    """The logarithm of the normal distribution's cumulative probability, without loss in either tail."""
    scaled = x / math.sqrt(2.0)
    left = select(x < -1, scaled, -1)
    tail = jnp.log(jsp.erfcx(-left) / 2) - left * left
    return select(x < -1, tail, lax.log1p(-lax.erfc(scaled) / 2))


@rule(aten.special_erfcx.default, promotion=Promotion.INT_TO_FLOAT)
def erfcx(self: Array) -> Array:
    """``exp(x**2) * erfc(x)``."""
    return jsp.erfcx(self)


@rule(aten.special_spherical_bessel_j0.default, promotion=Promotion.INT_TO_FLOAT)
def spherical_bessel_j0(x: Array) -> Array:
    """``sin(x) / x``, by its series near 0."""
    square = x * x
    series = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    safe = select(jnp.abs(x) < 0.5, 1, x)
    value = select(jnp.abs(x) < 0.5, series, jnp.sin(safe) / safe)
    return select(jnp.isinf(x), jnp.zeros_like(x), value)


# Bessel functions. Whatever the operand's dtype, all is computed in float64.

# Hankel's asymptotic expansion is good to float64 accuracy from here on.
_FAR: Final = 25.0
# Below it the first term of a series is all that float64 has.
_TINY: Final = 1e-9
# Where Miller's backward recurrence starts: far enough beyond ``_FAR`` (A&S 9.12).
_MILLER_START: Final = 80


def _neumann_row(order: int) -> tuple[float, float, float]:
    half, odd = divmod(order, 2)
    sign = -1.0 if half % 2 else 1.0
    if odd:
        return 0.0, 0.0, sign * order / (half * (half + 1)) if half else 0.0
    return 2.0, -sign / half if half else 0.0, 0.0


# What J of each order contributes to the norm (their sum is 1), to Y0 and to Y1.
_NEUMANN: Final = np.array([_neumann_row(order) for order in range(_MILLER_START + 1)])


def _miller(x: Array) -> tuple[Array, Array, Array, Array]:
    """J0, J1, Y0 and Y1 for 0 < x <= 25, by backward recurrence and Neumann's series.

    DLMF 10.8 and Abramowitz & Stegun 9.1.87 and 9.1.88 for Y0 and Y1.
    """

    def descend(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        after, here, norm, y0, y1 = sums
        order = _MILLER_START - index
        # ``here`` is J of this order, up to a common factor
        for_norm, for_y0, for_y1 = jnp.asarray(_NEUMANN)[order]
        norm, y0, y1 = norm + for_norm * here, y0 + for_y0 * here, y1 + for_y1 * here
        after, here = here, 2 * order / x * here - after
        # The recurrence grows without bound for small x.
        scale = select(jnp.abs(here) > 1e200, 1e-200, jnp.ones_like(x))
        return after * scale, here * scale, norm * scale, y0 * scale, y1 * scale

    nothing = jnp.zeros_like(x)
    start = (nothing, jnp.full_like(x, 1e-290), nothing, nothing, nothing)
    after, here, norm, y0, y1 = lax.fori_loop(0, _MILLER_START, descend, start)
    norm = norm + here
    j0, j1, y0, y1 = here / norm, after / norm, y0 / norm, y1 / norm
    log = jnp.log(x / 2) + _EULER_GAMMA
    by = 2 / np.pi
    return j0, j1, by * (log * j0 + 2 * y0), by * ((log - 1) * j1 - y1 - j0 / x)


def _hankel(x: Array, order: int) -> tuple[Array, Array]:
    """J and Y of ``order`` for x > 25 (DLMF 10.17.3 and 10.17.4)."""
    even = odd = jnp.zeros_like(x)
    term = jnp.ones_like(x)
    for k in range(20):
        sign = -1 if k % 4 >= 2 else 1
        if k % 2:
            odd = odd + sign * term
        else:
            even = even + sign * term
        term = term * (4 * order**2 - (2 * k + 1) ** 2) / ((k + 1) * 8 * x)
    phase = x - (order / 2 + 0.25) * np.pi
    scale = jnp.sqrt(2 / (np.pi * x))
    cosine, sine = jnp.cos(phase), jnp.sin(phase)
    return scale * (cosine * even - sine * odd), scale * (sine * even + cosine * odd)


def _bessel(x: Array, order: int, second: bool) -> Array:
    size = jnp.abs(x.astype(np.float64))
    far, beside_zero = size > _FAR, size < _TINY
    near = _miller(select(far | beside_zero, 1.0, size))[order + 2 * second]
    distant = _hankel(select(far, size, _FAR), order)[int(second)]
    return select(far, distant, select(beside_zero, _bessel_beside_zero(size, order, second), near))


def _bessel_beside_zero(size: Array, order: int, second: bool) -> Array:
    """The first term of the series (DLMF 10.7): the next is smaller by the square of ``size``."""
    if not second:
        return size / 2 if order else jnp.ones_like(size)
    by = 2 / np.pi
    return -by / size if order else by * (jnp.log(size) - math.log(2) + _EULER_GAMMA)


def _register_first_kind(name: object, order: int) -> None:
    @rule(name, promotion=Promotion.INT_TO_FLOAT)
    def first_kind(self: Array) -> Array:
        value = _bessel(self, order, second=False)
        value = select(jnp.isinf(self), jnp.zeros_like(value), value)
        negative = jnp.signbit(self) if order else self < 0
        return select(negative, (-1) ** order * value, value)


def _register_second_kind(name: object, order: int) -> None:
    @rule(name, promotion=Promotion.INT_TO_FLOAT)
    def second_kind(x: Array) -> Array:
        value = _bessel(x, order, second=True)
        value = select(x == 0, jnp.full_like(value, -np.inf), value)
        value = select(jnp.isposinf(x), jnp.zeros_like(value), value)
        return select(x < 0, jnp.full_like(value, np.nan), value)


# Trapezoidal sums of an integrand that is analytic in a strip and decays doubly exponentially
# converge exponentially: this many reach float64 accuracy for all x from ``_TINY`` on.
_NODES: Final = 400
# exp(-_NOTHING) is no part of a float64 sum any more.
_NOTHING: Final = 50.0


def _modified_second_kind(x: Array, order: int) -> Array:
    """``exp(x) * K(x)`` as an integral over ``exp(-x * (cosh(t) - 1)) * cosh(order * t)`` (DLMF 10.32.9)."""
    wide = x.astype(np.float64)
    inside = (wide > _TINY) & (wide < np.inf)
    safe = select(inside, wide, 1.0)
    # arccosh(1 + y), of which nothing is lost for small y
    root = jnp.sqrt(safe)
    step = 2 * jnp.arcsinh(math.sqrt(_NOTHING / 2) / root) / (_NODES - 1)

    def add_node(index: Array, total: Array) -> Array:
        t = index * step
        # 2 * sinh(t/2)**2 is cosh(t) - 1 without its cancellation
        exponent = 2 * jnp.square(jnp.sinh(t / 2) * root)
        return total + jnp.exp(order * t - exponent) * (1 + jnp.exp(-2.0 * order * t)) / 2

    total = lax.fori_loop(1, _NODES, add_node, jnp.full_like(safe, 0.5)) * step
    beside_zero = 1 / jnp.abs(wide) if order else math.log(2) - jnp.log(wide) - _EULER_GAMMA
    total = select(wide <= _TINY, beside_zero * (1 + wide), total)
    total = select(wide == np.inf, jnp.zeros_like(total), total)
    return select((wide < 0) | jnp.isnan(wide), jnp.full_like(total, np.nan), total)


def _register_modified(name: object, order: int, scaled: bool) -> None:
    @rule(name, promotion=Promotion.INT_TO_FLOAT)
    def modified(x: Array) -> Array:
        value = _modified_second_kind(x, order)
        # K decays like exp(-x): at infinity both factors are 0
        return value if scaled else value * jnp.exp(-x.astype(np.float64))


_register_first_kind(aten.special_bessel_j0.default, 0)
_register_first_kind(aten.special_bessel_j1.default, 1)
_register_second_kind(aten.special_bessel_y0.default, 0)
_register_second_kind(aten.special_bessel_y1.default, 1)
_register_modified(aten.special_modified_bessel_k0.default, 0, scaled=False)
_register_modified(aten.special_modified_bessel_k1.default, 1, scaled=False)
_register_modified(aten.special_scaled_modified_bessel_k0.default, 0, scaled=True)
_register_modified(aten.special_scaled_modified_bessel_k1.default, 1, scaled=True)
