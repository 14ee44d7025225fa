"""Pseudo-inverses, and QR factorisations in the form of Householder reflections."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array, lax

from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import aten, rule


def _pinv_meta(
    self: torch.Tensor, *, atol: object = None, rtol: object = None, hermitian: bool = False
) -> torch.Tensor:
    return torch.empty_like(self.mT, memory_format=torch.contiguous_format)


def _cutoff(values: Array, size: int, atol: Array | None, rtol: Array | None) -> Array:
    """Below which magnitude a singular value counts as zero, ``[..., 1]``."""
    default = jnp.asarray(jnp.finfo(values.dtype).eps * size, values.dtype)
    absolute = jnp.zeros((), values.dtype) if atol is None else atol.astype(values.dtype)
    if rtol is not None:
        relative = rtol.astype(values.dtype)
    else:
        relative = default if atol is None else select(absolute > 0, 0, default)
    largest = jnp.max(values, -1, keepdims=True, initial=0)
    return jnp.maximum(absolute[..., None], relative[..., None] * largest)


@rule(aten.linalg_pinv.atol_rtol_tensor, meta=_pinv_meta)
def pinv(
    self: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False
) -> Array:
    """The Moore-Penrose inverse, from the singular value or the eigenvalue decomposition."""
    if self.size == 0:
        return jnp.swapaxes(self, -1, -2)
    if hermitian:
        left, values = lax.linalg.eigh(self, symmetrize_input=False)
        right = left
    else:
        left, values, rows = jnp.linalg.svd(self, full_matrices=False)
        right = jnp.conj(jnp.swapaxes(rows, -1, -2))
    size = jnp.abs(values)
    kept = size > _cutoff(size, max(self.shape[-2:]), atol, rtol)
    inverse = select(kept, 1 / select(kept, values, 1), 0).astype(self.dtype)
    scaled = right * inverse[..., None, :]
    return jnp.matmul(scaled, jnp.conj(jnp.swapaxes(left, -1, -2)), precision="highest")


def _geqrf_meta(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if self.dim() < 2:
        raise RuntimeError("torch.geqrf: input must have at least 2 dimensions.")
    return torch.empty_like(self), self.new_empty(*self.shape[:-2], min(self.shape[-2:]))


@rule(aten.geqrf.default, meta=_geqrf_meta)
def geqrf(self: Array) -> tuple[Array, Array]:
    """Householder vectors below the triangular factor, and the reflections' scales."""
    if self.size == 0:
        return self, jnp.zeros((*self.shape[:-2], min(self.shape[-2:])), self.dtype)
    packed, tau = jnp.linalg.qr(self, mode="raw")
    return jnp.swapaxes(packed, -1, -2), tau


@rule(aten.ormqr.default)
def ormqr(
    self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False
) -> Array:
    """``input3`` multiplied by the orthogonal matrix of a QR factorisation, or by its adjoint."""
    rows = self.shape[-2]
    reflectors = self[..., :rows]  # a wide matrix has no more of them than rows
    padding = [(0, 0)] * (self.ndim - 1) + [(0, rows - reflectors.shape[-1])]
    q = lax.linalg.householder_product(jnp.pad(reflectors, padding), input2)
    q = jnp.conj(jnp.swapaxes(q, -1, -2)) if transpose else q
    first, second = (q, input3) if left else (input3, q)
    return jnp.matmul(first, second, precision="highest")
