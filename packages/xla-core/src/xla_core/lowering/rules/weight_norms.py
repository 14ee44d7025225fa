"""Weights that are normalised: each entry of a dimension by its norm.

Sums are taken in float32 for half-precision inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from xla_core.lowering.rules.common import Scalar, opmath
from xla_core.operators.lowering_registry import aten, rule

# Weight normalisation: one norm for each entry of ``dim``, the first or the last.


def _norm_axes(v: Array, dim: int) -> tuple[int, ...]:
    return tuple(a for a in range(v.ndim) if a != dim % v.ndim)


@rule(aten._weight_norm_interface.default)
def weight_norm(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    """``g * v / norm(v)`` and the norms, which have the shape of ``g``."""
    wide = opmath(v)
    norms = jnp.sqrt(jnp.sum(wide * wide, _norm_axes(v, dim), keepdims=True))
    return (wide * (g.astype(wide.dtype) / norms)).astype(v.dtype), norms


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    grad_w: Array, saved_v: Array, saved_g: Array, saved_norms: Array, dim: int
) -> tuple[Array, Array]:
    """Gradients by ``v`` and ``g``."""
    grad, v = opmath(grad_w), opmath(saved_v)
    norms, g = saved_norms.astype(v.dtype), saved_g.astype(v.dtype)
    by_g = jnp.sum(grad * v, _norm_axes(v, dim), keepdims=True) / norms
    return (g / norms) * (grad - v * (by_g / norms)), by_g


@rule(aten.renorm.default, lift=("maxnorm",))
def renorm(self: Array, p: float, dim: int, maxnorm: Scalar) -> Array:
    """Entries of ``dim`` whose p-norm exceeds ``maxnorm`` scaled down to it."""
    wide = opmath(self)
    size = jnp.linalg.norm(jnp.moveaxis(wide, dim, 0).reshape(wide.shape[dim], -1), ord=p, axis=1)
    limit = jnp.asarray(maxnorm).astype(wide.dtype)
    factor = jnp.where(size > limit, limit / (size + 1e-7), 1)
    shape = [n if a == dim % wide.ndim else 1 for a, n in enumerate(wide.shape)]
    return wide * factor.reshape(shape)
