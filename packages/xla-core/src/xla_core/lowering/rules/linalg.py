"""Matrix factorisations, solvers and what is built on them.

``info`` results say whether a factorisation failed, as 0 or the position of the first zero pivot;
a Cholesky factorisation that failed gives NaNs and an ``info`` of 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import opmath, output_shape
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import RuleContext, aten, rule


def _h(matrix: Array) -> Array:
    """The conjugate transpose."""
    return jnp.conj(jnp.swapaxes(matrix, -1, -2))


def _cholesky(self: Array, upper: bool) -> Array:
    factor = lax.linalg.cholesky(_h(self) if upper else self, symmetrize_input=False)
    return _h(factor) if upper else factor


@rule(aten.linalg_cholesky_ex.default)
def cholesky_ex(
    self: Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    """The triangular factor and ``info``."""
    factor = _cholesky(self, upper)
    failed = jnp.any(jnp.isnan(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
    return factor, failed.astype(np.int32)


@rule(aten.cholesky.default)
def cholesky(self: Array, upper: bool = False) -> Array:
    """The triangular factor."""
    return _cholesky(self, upper)


def _solve_triangular(
    a: Array, b: Array, *, left: bool = True, lower: bool, adjoint: bool = False, unit: bool = False
) -> Array:
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return lax.linalg.triangular_solve(
        jnp.broadcast_to(a, (*batch, *a.shape[-2:])),
        jnp.broadcast_to(b, (*batch, *b.shape[-2:])),
        left_side=left,
        lower=lower,
        transpose_a=adjoint,
        conjugate_a=adjoint,
        unit_diagonal=unit,
    )


@rule(aten.linalg_solve_triangular.default)
def solve_triangular(
    self: Array, B: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """Solution of a triangular system, from the left or the right."""
    return _solve_triangular(self, B, left=left, lower=not upper, unit=unitriangular)


@rule(aten.triangular_solve.default, context=True)
def triangular_solve(
    context: RuleContext,
    self: Array,
    A: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Array, Array]:
    """Solution of ``A x = self`` and a copy of ``A``."""
    if transpose:
        A_used, lower = jnp.swapaxes(A, -1, -2), upper
    else:
        A_used, lower = A, not upper
    solution = _solve_triangular(A_used, self, lower=lower, unit=unitriangular)
    return solution, jnp.broadcast_to(A, output_shape(context, 1))


@rule(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(self: Array, input2: Array, upper: bool = False) -> Array:
    """Solution of a system given by its Cholesky factor."""
    half = _solve_triangular(input2, self, lower=not upper, adjoint=upper)
    return _solve_triangular(input2, half, lower=not upper, adjoint=not upper)


@rule(aten.cholesky_inverse.default)
def cholesky_inverse(self: Array, upper: bool = False) -> Array:
    """The inverse of the matrix whose Cholesky factor is given."""
    unit = jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
    return cholesky_solve(unit, self, upper)


@rule(aten.linalg_qr.default)
def qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """``Q`` and ``R``; for mode ``r``, ``Q`` is empty."""
    if mode == "r":
        return jnp.zeros((0,), A.dtype), jnp.linalg.qr(A, mode="r")
    q, r = lax.linalg.qr(A, full_matrices=mode == "complete")
    return q, jnp.triu(r)


@rule(aten.linalg_householder_product.default)
def householder_product(input: Array, tau: Array) -> Array:
    """The product of Householder reflections."""
    return lax.linalg.householder_product(input, tau)


@rule(aten._linalg_svd.default, context=True)
def svd(
    context: RuleContext,
    A: Array,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Array, ...]:
    """Left vectors, singular values, right vectors (rows); the vectors are empty if unwanted."""
    if compute_uv:
        return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))
    values = jnp.linalg.svd(A, compute_uv=False)
    empty = [jnp.zeros(output_shape(context, place), A.dtype) for place in (0, 2)]
    return empty[0], values, empty[1]


@rule(aten._linalg_eigh.default, context=True)
def eigh(
    context: RuleContext, A: Array, UPLO: str = "L", compute_v: bool = True
) -> tuple[Array, Array]:
    """Eigenvalues in ascending order and eigenvectors (empty if unwanted)."""
    vectors, values = lax.linalg.eigh(A, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(output_shape(context, 1), A.dtype)


@rule(aten.linalg_matrix_sqrth.default)
def matrix_sqrth(self: Array) -> Array:
    """The principal square root of a Hermitian matrix, of which the lower triangle is read.

    A negative eigenvalue counts as 0, as on the CPU.
    """
    vectors, values = lax.linalg.eigh(self, symmetrize_input=False)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :].astype(self.dtype)) @ _h(
        vectors
    )


@rule(aten.linalg_polar.default)
def polar(A: Array) -> tuple[Array, Array]:
    """The factor with orthonormal columns and the positive one, from the singular vectors."""
    left, values, right = jnp.linalg.svd(A, full_matrices=False)
    return left @ right, (_h(right) * values[..., None, :].astype(A.dtype)) @ right


# LU factorisation and what is computed from it. PyTorch counts pivots from 1.


def _lu(a: Array) -> tuple[Array, Array, Array]:
    """The packed factors, the pivots as PyTorch counts them, and the permutation of rows."""
    factors, pivots, permutation = lax.linalg.lu(a)
    return factors, pivots.astype(np.int32) + 1, permutation


def _info(factors: Array) -> Array:
    """The first zero pivot, counted from 1, or 0."""
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    if zero.shape[-1] == 0:
        return jnp.zeros(zero.shape[:-1], np.int32)
    return select(jnp.any(zero, -1), jnp.argmax(zero, -1).astype(np.int32) + 1, 0)


def _permutation(pivots: Array, rows: int) -> Array:
    """The rows' order after the swaps that ``pivots`` (counted from 1) stand for."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


def _lu_solve(factors: Array, order: Array, b: Array, adjoint: bool = False) -> Array:
    """Solution of ``A x = b``, or of the adjoint system."""
    batch = np.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    factors = jnp.broadcast_to(factors, (*batch, *factors.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    order = jnp.broadcast_to(order, (*batch, order.shape[-1]))[..., None]
    if adjoint:
        x = _solve_triangular(factors, b, lower=False, adjoint=True)
        x = _solve_triangular(factors, x, lower=True, adjoint=True, unit=True)
        return jnp.take_along_axis(x, jnp.argsort(order, -2), -2)
    x = _solve_triangular(factors, jnp.take_along_axis(b, order, -2), lower=True, unit=True)
    return _solve_triangular(factors, x, lower=False)


def _is_vector(a: Array, b: Array) -> bool:
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


@rule(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(
    A: Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    """Packed factors, pivots and ``info``; pivoting cannot be turned off."""
    factors, pivots, _ = _lu(A)
    return factors, pivots, _info(factors)


@rule(aten.lu_unpack.default)
def lu_unpack(
    LU_data: Array, LU_pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    """The permutation matrix and the two triangular factors; empty where unwanted."""
    rows, columns = LU_data.shape[-2:]
    small = min(rows, columns)
    p = lower = upper = jnp.zeros((0,), LU_data.dtype)
    if unpack_pivots:
        order = _permutation(LU_pivots, rows)
        p = jax.nn.one_hot(order, rows, dtype=LU_data.dtype, axis=-2)
    if unpack_data:
        unit = jnp.eye(rows, small, dtype=LU_data.dtype)
        lower = jnp.tril(LU_data[..., :small], -1) + unit
        upper = jnp.triu(LU_data[..., :small, :])
    return p, lower, upper


@rule(aten.linalg_lu.default)
def lu(A: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    """The permutation matrix and the two triangular factors."""
    factors, pivots, _ = _lu(A)
    return lu_unpack(factors, pivots)


@rule(aten.linalg_lu_solve.default)
def lu_solve(
    LU: Array, pivots: Array, B: Array, *, left: bool = True, adjoint: bool = False
) -> Array:
    """Solution of a system given by its LU factors, from the left or the right."""
    order = _permutation(pivots, LU.shape[-1])
    if left:
        return _lu_solve(LU, order, B, adjoint)
    return _h(_lu_solve(LU, order, _h(B), not adjoint))


@rule(aten._linalg_solve_ex.default)
def solve_ex(
    A: Array, B: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, ...]:
    """Solution of ``A x = B`` (or ``x A = B``), the LU factors, pivots and ``info``."""
    factors, pivots, order = _lu(A)
    vector = _is_vector(A, B)
    b = B[..., None] if vector else B
    x = _lu_solve(factors, order, b) if left else _h(_lu_solve(factors, order, _h(b), True))
    return x[..., 0] if vector else x, factors, pivots, _info(factors)


@rule(aten.linalg_inv_ex.default)
def inv_ex(A: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    """The inverse and ``info``."""
    factors, _, order = _lu(A)
    unit = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return _lu_solve(factors, order, unit), _info(factors)


def _determinant_lu(a: Array) -> tuple[Array, Array]:
    """Factors and pivots as PyTorch's gradients expect them: of the transpose if ``a`` is real."""
    real = not jnp.iscomplexobj(a)
    factors, pivots, _ = _lu(jnp.swapaxes(a, -1, -2) if real else a)
    return factors, pivots


def _parity(pivots: Array, dtype: object) -> Array:
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), -1)
    return (1 - 2 * (swaps % 2)).astype(dtype)


@rule(aten._linalg_det.default)
def det(A: Array) -> tuple[Array, Array, Array]:
    """The determinant, the LU factors and pivots."""
    factors, pivots = _determinant_lu(A)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, -1) * _parity(pivots, A.dtype), factors, pivots


@rule(aten._linalg_slogdet.default)
def slogdet(A: Array) -> tuple[Array, ...]:
    """Sign and logarithm of the determinant, the LU factors and pivots."""
    factors, pivots = _determinant_lu(A)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    sign = jnp.prod(jnp.sign(diagonal), -1) * _parity(pivots, A.dtype)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), -1), factors, pivots


@rule(aten.linalg_matrix_exp.default)
def matrix_exp(self: Array) -> Array:
    """The matrix exponential."""
    return jax.scipy.linalg.expm(opmath(self))
