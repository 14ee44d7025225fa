"""Matrix products and linear layers against PyTorch's CPU kernels."""

from __future__ import annotations

import pytest
import torch
import xla_core.lowering.rules as rules
from xla_core.testing.rules import check, evaluate

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-5, 6, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Sums of products round in another order than BLAS does: a few ulps of the largest term.
    loose = {torch.bfloat16: (2e-2, 5e-2)}.get(dtype, (1e-4, 1e-4) if not dtype.is_signed or
             dtype in (torch.float32, torch.complex64) else None)  # fmt: skip
    a, b = _draw(5, 7, dtype=dtype), _draw(7, 3, dtype=dtype)
    check(aten.mm.default, a, b, tolerance=loose)
    check(aten.bmm.default, _draw(2, 5, 7, dtype=dtype), _draw(2, 7, 3, dtype=dtype), tolerance=loose)
    check(aten.mv.default, a, _draw(7, dtype=dtype), tolerance=loose)
    check(aten.dot.default, _draw(9, dtype=dtype), _draw(9, dtype=dtype), tolerance=loose)
    check(aten.vdot.default, _draw(9, dtype=dtype), _draw(9, dtype=dtype), tolerance=loose)
    check(aten.matmul.default, _draw(2, 1, 5, 7, dtype=dtype), _draw(4, 7, 3, dtype=dtype), tolerance=loose)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 2), (2, 3), (1, 0)])
def test_products_added(dtype: torch.dtype, beta: int, alpha: int) -> None:
    torch.manual_seed(1)
    loose = (2e-2, 1e-1) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    settings = {"beta": beta, "alpha": alpha, "tolerance": loose}
    a, b = _draw(4, 7, dtype=dtype), _draw(7, 3, dtype=dtype)
    for added in (_draw(4, 3, dtype=dtype), _draw(3, dtype=dtype), _draw(4, 1, dtype=dtype)):
        check(aten.addmm.default, added, a, b, **settings)
    batched = _draw(2, 4, 7, dtype=dtype), _draw(2, 7, 3, dtype=dtype)
    check(aten.baddbmm.default, _draw(2, 4, 3, dtype=dtype), *batched, **settings)
    check(aten.addbmm.default, _draw(4, 3, dtype=dtype), *batched, **settings)
    check(aten.addmv.default, _draw(4, dtype=dtype), a, _draw(7, dtype=dtype), **settings)
    check(aten.addr.default, _draw(4, 3, dtype=dtype), _draw(4, dtype=dtype), _draw(3, dtype=dtype), **settings)


def test_zero_beta_does_not_spread_nan() -> None:
    nan = torch.full((2, 2), torch.nan)
    check(aten.addmm.default, nan, torch.ones(2, 3), torch.ones(3, 2), beta=0, alpha=1)


def test_empty_products() -> None:
    check(aten.mm.default, torch.ones(2, 0), torch.ones(0, 3))
    check(aten.mm.default, torch.ones(0, 2), torch.ones(2, 3))
    check(aten.addmm.default, torch.ones(3), torch.ones(2, 0), torch.ones(0, 3))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7)])
def test_linear(shape: tuple[int, ...]) -> None:
    weight, bias = torch.randn(4, 7), torch.randn(4)
    check(aten.linear.default, torch.randn(shape), weight, bias, tolerance=(1e-4, 1e-5))
    check(aten.linear.default, torch.randn(shape), weight, None, tolerance=(1e-4, 1e-5))


def test_linear_gradients() -> None:
    x = torch.randn(2, 3, 7, requires_grad=True)
    weight, bias = torch.randn(4, 7, requires_grad=True), torch.randn(4, requires_grad=True)
    out = torch.nn.functional.linear(x, weight, bias)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [x, weight, bias], grad)
    operands = x.detach(), grad, weight.detach()
    got = evaluate(aten.linear_backward.default, *operands, [True, True, True])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_trilinear() -> None:
    a, b, c = torch.randn(6, 3), torch.randn(4, 3, 5), torch.randn(6, 5)
    check(aten._trilinear.default, a, b, c, [1, 3], [0], [1, 2], [2, 3], tolerance=(1e-4, 1e-4))
