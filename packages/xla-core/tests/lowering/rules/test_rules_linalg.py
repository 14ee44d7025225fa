"""Factorisations, solvers and Fourier transforms against PyTorch's CPU kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.rules import Call, evaluate
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

# Condition numbers of the matrices drawn here stay below a hundred; both libraries call LAPACK
# but block differently.
LOOSE = {torch.float32: (1e-3, 1e-4), torch.float64: (1e-9, 1e-10), torch.complex64: (1e-3, 1e-4)}
DTYPES = [torch.float32, torch.complex64]


def _draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype)


def _regular(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return _draw(*shape, dtype=dtype) + 3 * torch.eye(shape[-1], dtype=dtype)


def _positive(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    a = _draw(*shape, dtype=dtype)
    return a @ a.mH + 2 * torch.eye(shape[-1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upper", [False, True])
@together
def test_cholesky(dtype: torch.dtype, upper: bool) -> Iterator[Call]:
    a, loose = _positive(2, 4, 4, dtype=dtype), LOOSE[dtype]
    yield Call(aten.linalg_cholesky_ex.default, a, upper=upper, tolerance=loose)
    factor = aten.linalg_cholesky_ex.default(a, upper=upper)[0].contiguous()
    if hasattr(aten, "cholesky"):  # torch 2.15 has it no more
        yield Call(aten.cholesky.default, a, upper, tolerance=loose)
    yield Call(
        aten.cholesky_solve.default, _draw(2, 4, 3, dtype=dtype), factor, upper, tolerance=loose
    )
    yield Call(aten.cholesky_inverse.default, factor, upper, tolerance=loose)


def test_failed_cholesky() -> None:
    factor, info = evaluate(aten.linalg_cholesky_ex.default, -torch.eye(3))
    assert factor is not None and info is not None
    assert info.item() == 1 and info.dtype == torch.int32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")  # and still there
@together
def test_triangular(dtype: torch.dtype) -> Iterator[Call]:
    loose = LOOSE[dtype]
    for upper, left, unit in itertools.product((False, True), repeat=3):
        a = _regular(2, 4, 4, dtype=dtype)
        b = _draw(4, 3, dtype=dtype) if left else _draw(3, 4, dtype=dtype)
        settings = {"upper": upper, "left": left, "unitriangular": unit}
        a = a.triu() if upper else a.tril()
        yield Call(aten.linalg_solve_triangular.default, a, b, **settings, tolerance=loose)
        if left:
            yield Call(aten.triangular_solve.default, b, a[0], upper, unit, unit, tolerance=loose)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@together
def test_qr(dtype: torch.dtype) -> Iterator[Call]:
    for mode, shape in itertools.product(("reduced", "complete", "r"), ((5, 3), (3, 5), (2, 4, 4))):
        yield Call(aten.linalg_qr.default, _draw(*shape, dtype=dtype), mode, tolerance=LOOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4)], ids=str)
@together
def test_svd(dtype: torch.dtype, full: bool, shape: tuple[int, ...]) -> Iterator[Call]:
    a = _draw(*shape, dtype=dtype)
    u, s, vh = evaluate(aten._linalg_svd.default, a, full)
    assert u is not None and s is not None and vh is not None
    rtol, atol = LOOSE[dtype]
    torch.testing.assert_close(s, torch.linalg.svdvals(a), rtol=rtol, atol=atol)
    # The vectors are unique up to a phase; what they multiply to is unique.
    small = s.shape[-1]
    product = u[..., :small] * s[..., None, :].to(dtype) @ vh[..., :small, :]
    torch.testing.assert_close(product, a, rtol=rtol, atol=atol)
    yield Call(aten._linalg_svd.default, a, full, False, tolerance=LOOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("triangle", ["L", "U"])
@together
def test_eigh(dtype: torch.dtype, triangle: str) -> Iterator[Call]:
    a = _positive(2, 4, 4, dtype=dtype)
    # Only one triangle may be read.
    spoilt = a.tril() if triangle == "L" else a.triu()
    values, vectors = evaluate(aten._linalg_eigh.default, spoilt, triangle)
    assert values is not None and vectors is not None
    rtol, atol = LOOSE[dtype]
    torch.testing.assert_close(values, torch.linalg.eigvalsh(a), rtol=rtol, atol=atol)
    product = vectors * values[..., None, :].to(dtype) @ vectors.mH
    torch.testing.assert_close(product, a, rtol=rtol, atol=10 * atol)
    yield Call(aten._linalg_eigh.default, spoilt, triangle, False, tolerance=LOOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@together
def test_lu(dtype: torch.dtype) -> Iterator[Call]:
    loose = LOOSE[dtype]
    for shape in ((4, 4), (2, 4, 4))[dtype.is_complex :]:
        a = _draw(*shape, dtype=dtype)
        yield Call(aten.linalg_lu_factor_ex.default, a, tolerance=loose)
        yield Call(aten.linalg_lu.default, a, tolerance=loose)
        factors, pivots, _ = aten.linalg_lu_factor_ex(a)
        factors = factors.contiguous()
        yield Call(aten.lu_unpack.default, factors, pivots, tolerance=loose)
        yield Call(aten._linalg_det.default, a, tolerance=loose)
        yield Call(aten._linalg_slogdet.default, a, tolerance=loose)
        yield Call(aten.linalg_inv_ex.default, a, tolerance=loose)
        for adjoint in (False, True):
            settings = {"adjoint": adjoint, "tolerance": loose}
            b = _draw(*shape[:-1], 3, dtype=dtype)
            yield Call(aten.linalg_lu_solve.default, factors, pivots, b, **settings)
            rows = b.mT.contiguous()
            yield Call(aten.linalg_lu_solve.default, factors, pivots, rows, left=False, **settings)
    for shape in ((5, 3), (3, 5)):
        yield Call(aten.linalg_lu.default, _draw(*shape, dtype=dtype), tolerance=loose)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@together
def test_solve(dtype: torch.dtype) -> Iterator[Call]:
    loose = LOOSE[dtype]
    a = _regular(2, 4, 4, dtype=dtype)
    yield Call(aten._linalg_solve_ex.default, a, _draw(2, 4, 3, dtype=dtype), tolerance=loose)
    yield Call(aten._linalg_solve_ex.default, a, _draw(2, 4, dtype=dtype), tolerance=loose)
    yield Call(aten._linalg_solve_ex.default, a[0], _draw(4, dtype=dtype), tolerance=loose)
    yield Call(
        aten._linalg_solve_ex.default, a, _draw(2, 3, 4, dtype=dtype), left=False, tolerance=loose
    )


@together
def test_singular() -> Iterator[Call]:
    yield Call(aten.linalg_lu_factor_ex.default, torch.ones(3, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@together
def test_householder_and_exponential(dtype: torch.dtype) -> Iterator[Call]:
    a, tau = torch.geqrf(_draw(5, 3, dtype=dtype))
    yield Call(aten.linalg_householder_product.default, a.contiguous(), tau, tolerance=LOOSE[dtype])
    yield Call(aten.linalg_matrix_exp.default, _draw(2, 3, 3, dtype=dtype), tolerance=LOOSE[dtype])


@pytest.mark.parametrize("dims", [[0], [0, 1], [2, 0]], ids=str)
@together
def test_fft(dims: list[int]) -> Iterator[Call]:
    real = _draw(4, 5, 6, dtype=torch.float32)
    mixed = _draw(4, 5, 6, dtype=torch.complex64)
    # Sums of up to 30 terms of size 1.
    loose = (1e-4, 1e-4)
    size = real.shape[dims[-1]]
    spectrum = aten._fft_r2c(real, dims, 0, True).contiguous()
    for normalization in range(3):
        for flag in (True, False):
            yield Call(aten._fft_c2c.default, mixed, dims, normalization, flag, tolerance=loose)
            yield Call(aten._fft_r2c.default, real, dims, normalization, flag, tolerance=loose)
        yield Call(aten._fft_c2r.default, spectrum, dims, normalization, size, tolerance=loose)


@pytest.mark.skipif(
    not hasattr(aten, "linalg_polar"), reason="torch 2.15 has these two, the versions before do not"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@together
def test_roots_and_polar_factors(dtype):
    yield Call(
        aten.linalg_matrix_sqrth.default, _positive(2, 4, 4, dtype=dtype), tolerance=LOOSE[dtype]
    )
    indefinite = _positive(4, 4, dtype=dtype) - 4 * torch.eye(4, dtype=dtype)
    yield Call(aten.linalg_matrix_sqrth.default, indefinite, tolerance=(1e-3, 1e-3))
    for shape in ((5, 3), (2, 3, 3), (0, 3, 2)):
        yield Call(aten.linalg_polar.default, _draw(*shape, dtype=dtype), tolerance=LOOSE[dtype])
