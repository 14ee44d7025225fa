"""Discrete Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from xla_core.operators.lowering_registry import aten, rule

# PyTorch's normalisation modes: none, by the root of the number of points, by that number.
_BY_ROOT, _BY_COUNT = 1, 2


def _scaled(value: Array, count: int, normalization: int) -> Array:
    if normalization == _BY_ROOT:
        return value * np.asarray(1 / np.sqrt(count), value.real.dtype)
    return value * np.asarray(1 / count, value.real.dtype) if normalization == _BY_COUNT else value


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    return int(np.prod([shape[d] for d in dims], dtype=np.int64))


@rule(aten._fft_c2c.default)
def fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """Complex to complex over ``dim``."""
    value = self
    for axis in dim:
        # norm="forward" leaves the inverse unscaled: the scale is applied once for all of them.
        value = (
            jnp.fft.fft(value, axis=axis)
            if forward
            else jnp.fft.ifft(value, axis=axis, norm="forward")
        )
    return _scaled(value, _count(self.shape, dim), normalization)


@rule(aten._fft_r2c.default)
def fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """Real to complex; the last of ``dim`` is halved if ``onesided``."""
    if not onesided:
        kind = np.complex128 if self.dtype == np.float64 else np.complex64
        return fft_c2c(self.astype(kind), dim, normalization, True)
    value = jnp.fft.rfft(self, axis=dim[-1])
    for axis in dim[:-1]:
        value = jnp.fft.fft(value, axis=axis)
    return _scaled(value, _count(self.shape, dim), normalization)


@rule(aten._fft_c2r.default)
def fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Complex to real; the last of ``dim`` is half of ``last_dim_size`` points."""
    value = self
    for axis in dim[:-1]:
        value = jnp.fft.ifft(value, axis=axis, norm="forward")
    value = jnp.fft.irfft(value, last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(value, _count(value.shape, dim), normalization)
