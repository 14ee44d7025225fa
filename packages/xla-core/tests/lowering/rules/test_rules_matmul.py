"""Matrix products and linear layers against PyTorch's CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.rules import Call, evaluate
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-5, 6, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@together
def test_products(dtype: torch.dtype) -> Iterator[Call]:
    torch.manual_seed(0)
    # Sums of products round in another order than BLAS does: a few ulps of the largest term.
    loose = {torch.bfloat16: (2e-2, 5e-2)}.get(dtype, (1e-4, 1e-4) if not dtype.is_signed or
             dtype in (torch.float32, torch.complex64) else None)  # fmt: skip
    a, b = _draw(5, 7, dtype=dtype), _draw(7, 3, dtype=dtype)
    yield Call(aten.mm.default, a, b, tolerance=loose)
    yield Call(
        aten.bmm.default, _draw(2, 5, 7, dtype=dtype), _draw(2, 7, 3, dtype=dtype), tolerance=loose
    )
    yield Call(aten.mv.default, a, _draw(7, dtype=dtype), tolerance=loose)
    yield Call(aten.dot.default, _draw(9, dtype=dtype), _draw(9, dtype=dtype), tolerance=loose)
    yield Call(aten.vdot.default, _draw(9, dtype=dtype), _draw(9, dtype=dtype), tolerance=loose)
    yield Call(
        aten.matmul.default,
        _draw(2, 1, 5, 7, dtype=dtype),
        _draw(4, 7, 3, dtype=dtype),
        tolerance=loose,
    )


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 2), (2, 3), (1, 0)])
@together
def test_products_added(beta: int, alpha: int) -> Iterator[Call]:
    for dtype in DTYPES:
        torch.manual_seed(1)
        loose = (2e-2, 1e-1) if dtype == torch.bfloat16 else (1e-4, 1e-4)
        settings = {"beta": beta, "alpha": alpha, "tolerance": loose}
        a, b = _draw(4, 7, dtype=dtype), _draw(7, 3, dtype=dtype)
        for added in (_draw(4, 3, dtype=dtype), _draw(3, dtype=dtype), _draw(4, 1, dtype=dtype)):
            yield Call(aten.addmm.default, added, a, b, **settings)
        batched = _draw(2, 4, 7, dtype=dtype), _draw(2, 7, 3, dtype=dtype)
        yield Call(aten.baddbmm.default, _draw(2, 4, 3, dtype=dtype), *batched, **settings)
        yield Call(aten.addbmm.default, _draw(4, 3, dtype=dtype), *batched, **settings)
        yield Call(aten.addmv.default, _draw(4, dtype=dtype), a, _draw(7, dtype=dtype), **settings)
        yield Call(
            aten.addr.default,
            _draw(4, 3, dtype=dtype),
            _draw(4, dtype=dtype),
            _draw(3, dtype=dtype),
            **settings,
        )


@together
def test_zero_beta_does_not_spread_nan() -> Iterator[Call]:
    nan = torch.full((2, 2), torch.nan)
    yield Call(aten.addmm.default, nan, torch.ones(2, 3), torch.ones(3, 2), beta=0, alpha=1)


@together
def test_empty_products() -> Iterator[Call]:
    yield Call(aten.mm.default, torch.ones(2, 0), torch.ones(0, 3))
    yield Call(aten.mm.default, torch.ones(0, 2), torch.ones(2, 3))
    yield Call(aten.addmm.default, torch.ones(3), torch.ones(2, 0), torch.ones(0, 3))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7)])
@together
def test_linear(shape: tuple[int, ...]) -> Iterator[Call]:
    weight, bias = torch.randn(4, 7), torch.randn(4)
    yield Call(aten.linear.default, torch.randn(shape), weight, bias, tolerance=(1e-4, 1e-5))
    yield Call(aten.linear.default, torch.randn(shape), weight, None, tolerance=(1e-4, 1e-5))


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


@together
def test_trilinear() -> Iterator[Call]:
    a, b, c = torch.randn(6, 3), torch.randn(4, 3, 5), torch.randn(6, 5)
    yield Call(
        aten._trilinear.default, a, b, c, [1, 3], [0], [1, 2], [2, 3], tolerance=(1e-4, 1e-4)
    )
