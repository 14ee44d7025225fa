"""Orthogonal polynomials by their three-term recurrences (DLMF 18.9), of a degree per element."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import Scalar, broadcast_to
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import Promotion, aten, rule

_Step = Callable[[Array, Array, Array, Array], Array]


def _evaluate(x: Array, n: Array, first: Array, step: _Step) -> Array:
    """The polynomial of degree ``n``; ``first`` is that of degree 1, ``step`` gives the next one."""
    shape = jnp.broadcast_shapes(x.shape, n.shape)
    x, first = broadcast_to(x, shape), broadcast_to(first, shape)
    degree = broadcast_to(n, shape).astype(np.int32)  # towards zero, as PyTorch's kernels
    ones = jnp.ones_like(x)
    highest = jnp.max(degree, initial=0)

    def raise_degree(state: tuple[Array, ...]) -> tuple[Array, ...]:
        k, before, here, value = state
        after = step(k.astype(x.dtype), x, before, here)
        return k + 1, here, after, select(degree == k + 1, after, value)

    value = select(degree == 0, ones, select(degree == 1, first, jnp.zeros_like(x)))
    begin = (jnp.ones((), np.int32), ones, first, value)
    return lax.while_loop(lambda state: state[0] < highest, raise_degree, begin)[3]


def _chebyshev(k: Scalar, x: Array, before: Array, here: Array) -> Array:
    return 2 * x * here - before


def _hermite_h(k: Scalar, x: Array, before: Array, here: Array) -> Array:
    return 2 * (x * here - k * before)


def _hermite_he(k: Scalar, x: Array, before: Array, here: Array) -> Array:
    return x * here - k * before


def _laguerre(k: Scalar, x: Array, before: Array, here: Array) -> Array:
    return ((2 * k + 1 - x) * here - k * before) / (k + 1)


def _legendre(k: Scalar, x: Array, before: Array, here: Array) -> Array:
    return ((2 * k + 1) * x * here - k * before) / (k + 1)


def _register(name: str, slope: int, offset: int, step: _Step, shifted: bool = False) -> None:
    """``slope * x + offset`` is the polynomial of degree 1."""
    packet = getattr(aten, f"special_{name}")
    overloads = (packet.default, packet.x_scalar, packet.n_scalar)

    @rule(*overloads, promotion=Promotion.INT_TO_FLOAT)
    def polynomial(x: Array, n: Array) -> Array:
        inner = 2 * x - 1 if shifted else x
        return _evaluate(inner, n, slope * inner + offset, step)


for _letter, _slope, _offset in (("t", 1, 0), ("u", 2, 0), ("v", 2, -1), ("w", 2, 1)):
    for _prefix in ("", "shifted_"):
        _name = f"{_prefix}chebyshev_polynomial_{_letter}"
        _register(_name, _slope, _offset, _chebyshev, shifted=bool(_prefix))
_register("hermite_polynomial_h", 2, 0, _hermite_h)
_register("hermite_polynomial_he", 1, 0, _hermite_he)
_register("laguerre_polynomial_l", -1, 1, _laguerre)
_register("legendre_polynomial_p", 1, 0, _legendre)
