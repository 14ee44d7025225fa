"""Numbers taken apart and put together by their exponents, and counted into bins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from xla_core.lowering.rules.common import Scalar, is_integer, opmath, opmath_dtype, output_dtype
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import RuleContext, aten, rule


@rule(aten.frexp.Tensor)
def frexp(self: Array) -> tuple[Array, Array]:
    """Mantissas in [0.5, 1) and exponents of 2."""
    mantissa, exponent = jnp.frexp(opmath(self))
    return mantissa, exponent.astype(np.int32)


def _ldexp_meta(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # as C++ defines it; torch 2.13: its meta kernel says other dtypes
    if self.is_floating_point() and not (other.is_floating_point() or other.is_complex()):
        return torch.empty_like(self).expand(torch.broadcast_shapes(self.shape, other.shape))
    return torch.mul(self, torch.pow(2.0, other))


@rule(aten.ldexp.Tensor, context=True, meta=_ldexp_meta)
def ldexp(context: RuleContext, self: Array, other: Array) -> Array:
    """``self * 2**other``."""
    dtype = opmath_dtype(output_dtype(context))
    if is_integer(other.dtype) or other.dtype == np.bool_:
        # exp2 is not exact for whole numbers
        power = jnp.ldexp(jnp.ones(other.shape, dtype), other.astype(np.int32))
    else:
        power = jnp.exp2(other.astype(dtype))
    return self.astype(dtype) * power


@rule(aten.histc.default)
def histc(self: Array, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Array:
    """How many elements fall in each of ``bins`` equal parts of [min, max], the data's if equal.

    Whole numbers are counted, too, as on GPUs: mixtures of experts count so what each expert gets.
    """
    x = self.reshape(-1)
    whole = is_integer(x.dtype)
    if whole:
        x = x.astype(np.int64)
    low, high = jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype)
    if min == max and x.size:
        low, high = jnp.min(x), jnp.max(x)
    level = low == high
    low, high = select(level, low - 1, low), select(level, high + 1, high)
    scaled = (x - low) * bins
    place = (scaled // (high - low) if whole else scaled / (high - low)).astype(np.int32)
    place = select(x == high, bins - 1, place)
    inside = (x >= low) & (x <= high)
    counts = jnp.zeros((bins,), np.int32).at[select(inside, place, 0)].add(inside.astype(np.int32))
    return counts


@rule(aten.nonzero_static.default)
def nonzero_static(self: Array, *, size: int, fill_value: int = -1) -> Array:
    """The indices of the first ``size`` elements that are not zero, filled up with ``fill_value``."""
    if self.ndim == 0:
        return jnp.zeros((size, 0), np.int64)
    if self.size == 0:
        return jnp.full((size, self.ndim), fill_value, np.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), -1)


@rule(aten.narrow_copy.default)
def narrow_copy(self: Array, dim: int, start: int, length: int) -> Array:
    """``length`` entries of a dimension from ``start``, as a tensor of their own."""
    size = self.shape[dim % self.ndim]
    first = start + size if start < 0 else start
    index = [slice(None)] * self.ndim
    index[dim % self.ndim] = slice(first, first + length)
    return self[tuple(index)]


@rule(aten._chunk_cat.default)
def chunk_cat(tensors: Sequence[Array], dim: int, num_chunks: int) -> Array:
    """Each tensor in ``num_chunks`` parts along ``dim``, zero-padded; the parts side by side."""
    dim = dim % tensors[0].ndim
    rows = []
    for tensor in tensors:
        missing = -tensor.shape[dim] % num_chunks
        padding = [(0, missing if a == dim else 0) for a in range(tensor.ndim)]
        padded = jnp.pad(tensor, padding)
        length = math.prod(padded.shape[dim:]) // num_chunks
        rows.append(padded.reshape(*padded.shape[:dim], num_chunks, length))
    return jnp.concatenate(rows, dim + 1)
