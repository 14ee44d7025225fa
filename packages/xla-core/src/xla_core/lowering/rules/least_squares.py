"""Least squares by the drivers of LAPACK: ``gels`` from a QR factorisation, the others from singular values.

``gelsy`` finds the rank from a pivoted factorisation on the CPU; here it comes from the singular values,
so that ranks agree but for matrices whose rank a rounding decides.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.compaction import number
from xla_core.operators.lowering_registry import ALL_OR_NOTHING, aten, inspected_rule

_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _is_vector(a: torch.Size, b: torch.Size) -> bool:
    return len(b) == 1 or (len(a) - 1 == len(b) and b == a[:-1])


def _lstsq_meta(
    self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    driver = driver or "gelsy"
    vector = self.dim() >= 2 and _is_vector(self.shape, b.shape)
    right = b.unsqueeze(-1) if vector else b
    if (
        self.dtype not in _DTYPES
        or self.dtype != b.dtype
        or self.dim() < 2
        or b.dim() < 1
        or driver not in _DRIVERS
        or self.shape[:-1] != right.shape[:-1]
    ):
        raise RuntimeError("wrong operands of lstsq")  # the CPU says it in its own words
    rows, columns = self.shape[-2:]
    batch = self.shape[:-2]
    nothing = self.new_empty(0)
    solution = self.new_empty((*batch, columns) if vector else (*batch, columns, right.shape[-1]))
    real = torch.empty(0, dtype=self.dtype, device="meta").real.dtype
    has_residuals = rows > columns and driver != "gelsy"
    residuals = nothing.new_empty((*batch, right.shape[-1]) if has_residuals else 0, dtype=real)
    rank = self.new_empty(0 if driver == "gels" else self.shape[:-2], dtype=torch.int64)
    with_values = driver in ("gelsd", "gelss")
    values = self.new_empty(
        (*self.shape[:-2], min(rows, columns)) if with_values else 0, dtype=real
    )
    return solution, residuals, rank, values, number(self)


def _looks(
    self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> bool:
    if driver == "gels":
        return True
    return driver in ("gelsd", "gelss") and self.shape[-2] > self.shape[-1]


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _h(matrix: Array) -> Array:
    return jnp.conj(jnp.swapaxes(matrix, -1, -2))


def _by_qr(a: Array, b: Array) -> tuple[Array, Array]:
    """The solution, and whether ``a`` has full rank beyond doubt."""
    wide = a.shape[-2] < a.shape[-1]
    q, r = lax.linalg.qr(_h(a) if wide else a, full_matrices=False)
    sizes = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    least = jnp.finfo(sizes.dtype).eps * max(a.shape[-2:]) * jnp.max(sizes, -1, keepdims=True)
    right = b if wide else _dot(_h(q), b)
    solved = lax.linalg.triangular_solve(
        r, right, left_side=True, transpose_a=wide, conjugate_a=wide
    )
    full = jnp.all(sizes > least)
    return _dot(q, solved) if wide else solved, full


def _by_values(a: Array, b: Array, rcond: float | None) -> tuple[Array, Array, Array]:
    """The shortest solution, the rank and the singular values."""
    left, values, right = jnp.linalg.svd(a, full_matrices=False)
    eps = float(jnp.finfo(values.dtype).eps)
    if rcond is None:
        rcond = eps * max(a.shape[-2:])
    kept = values > (eps if rcond < 0 else rcond) * values[..., :1]
    inverse = select(kept, 1 / select(kept, values, 1), 0)
    solution = _dot(_h(right), inverse[..., None].astype(a.dtype) * _dot(_h(left), b))
    return solution, jnp.sum(kept, -1), values


@inspected_rule(
    aten.linalg_lstsq.default,
    meta=_lstsq_meta,
    dims=lambda *_, **__: (None, ALL_OR_NOTHING, None, None),
    looks=_looks,
)
def lstsq(
    self: Array, b: Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Array, ...]:
    """Solution, squared residuals (only of full rank), rank, singular values.

    The number is -1 where ``gels`` may have met a matrix without full rank, which the CPU is to decide,
    and 0 where there are no residuals.
    """
    rows, columns = self.shape[-2:]
    vector = _is_vector(self.shape, b.shape)
    right = b[..., None] if vector else b
    empty = jnp.zeros((0,), np.int64)
    rank, values = empty, empty.astype(jnp.finfo(self.dtype).dtype)
    full = jnp.ones((), np.bool_)
    if not (self.size and b.size):
        solution = jnp.zeros((*self.shape[:-2], columns, right.shape[-1]), self.dtype)
        rank = jnp.zeros(self.shape[:-2], np.int64)
        values = jnp.zeros((*self.shape[:-2], min(rows, columns)), values.dtype)
    elif driver == "gels":
        solution, full = _by_qr(self, right)
    else:
        solution, rank, values = _by_values(self, right, rcond)
        full = jnp.all(rank == columns)
    residuals = empty
    if rows > columns and driver not in (None, "gelsy"):
        missed = right - _dot(self, solution)
        residuals = jnp.sum(jnp.square(jnp.abs(missed)), -2) * (self.size > 0 or driver != "gels")
    if driver == "gels":
        rank, values = empty, empty
    if driver in (None, "gelsy"):
        values = empty
    lacking = np.int64(-1 if driver == "gels" else 0)
    solution = solution[..., 0] if vector else solution
    return solution, residuals, rank, values, select(full, np.int64(1), lacking)
