"""Matrix products and linear layers against PyTorch's CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.against_cpu import fallbacks
from xla_core.testing.rules import Call, evaluate
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

_ENDS = {"offs": torch.tensor([2, 2, 5, 8], dtype=torch.int32)}
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_groups_with_a_matrix_each(dtype: torch.dtype) -> None:
    """The layers of a mixture of experts: some experts get no token, some tokens no expert."""
    torch.manual_seed(0)
    tokens, experts = _draw(8, 16).to(dtype), _draw(4, 16, 8).to(dtype)
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)

    def products(tokens: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> list[object]:
        tokens, experts = tokens.requires_grad_(), experts.requires_grad_()
        rows = torch.nn.functional.grouped_mm(tokens, experts, offs=ends)
        (rows * rows).sum().backward()
        turned = tokens.detach().t(), experts.detach().mT
        columns = torch.nn.functional.grouped_mm(turned[1], turned[0], offs=ends)
        summed = torch.nn.functional.grouped_mm(turned[0], rows.detach(), offs=ends)
        batched = torch.nn.functional.grouped_mm(turned[1], experts.detach())
        return [rows, tokens.grad, experts.grad, columns, summed, batched]

    with fallbacks() as ran_on_cpu:
        found = products(tokens.to("xla"), experts.to("xla"), ends.to("xla"))
    assert not ran_on_cpu
    for mine, wanted in zip(found, products(tokens, experts, ends), strict=True):
        torch.testing.assert_close(
            mine.cpu(), wanted, rtol=1e-2 if dtype.itemsize < 4 else 1e-5, atol=1e-4
        )
    before = torch.nn.functional.grouped_mm(
        tokens.to("xla"), experts.to("xla"), offs=ends.to("xla") // 2
    )
    assert not before[4:].any()  # tokens behind the last group


@pytest.mark.parametrize(
    "change",
    [
        {"offs": None},
        {"offs": torch.tensor([2, 2, 5, 8])},
        {"offs": torch.tensor([2, 5, 8], dtype=torch.int32)},
        {"mat2": torch.ones(4, 8, 8)},
        {"mat2": torch.ones(4, 16, 8, dtype=torch.float64)},
        {"bias": torch.ones(8)},
        {"out_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_mistakes_in_products_of_groups(change: dict[str, object]) -> None:
    operands = {"self": torch.ones(8, 16), "mat2": torch.ones(4, 16, 8), **_ENDS, **change}
    with pytest.raises(RuntimeError) as wanted:
        aten._grouped_mm(**operands)
    there = {k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in operands.items()}
    with pytest.raises(RuntimeError) as found:
        aten._grouped_mm(**there)
    assert str(found.value) == str(wanted.value)


@together
def test_products_of_bytes() -> Iterator[Call]:
    torch.manual_seed(0)
    left = torch.randint(-128, 128, (17, 64), dtype=torch.int8)
    right = torch.randint(-128, 128, (64, 8), dtype=torch.int8)
    yield Call(aten._int_mm.default, left, right)
