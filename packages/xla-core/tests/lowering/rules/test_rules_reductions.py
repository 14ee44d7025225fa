"""Reductions, scans, softmax and factories against PyTorch's CPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.lowering.rules.common import present
from xla_core.testing.against_cpu import assert_agrees_with_cpu, fallbacks
from xla_core.testing.rules import Call, check, check_all, evaluate

aten = torch.ops.aten

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
FLOATS = [torch.float32, torch.float64, torch.bfloat16]
NAN = float("nan")
INFINITY = float("inf")


def values(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4, 5), seed: int = 0) -> torch.Tensor:
    """Distinct random values of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.3
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: torch.dtype) -> None:
    value = values(dtype)
    check_all(
        [
            Call(aten.sum.default, value),
            Call(aten.sum.dim_IntList, value, [0, -1]),
            Call(aten.sum.dim_IntList, value, [1], True),
            Call(aten.sum.dim_IntList, value, None, dtype=torch.float32),
            Call(aten.prod.dim_int, value, 1),
            Call(aten.nansum.default, value, [1]),
            Call(aten.any.default, value),
            Call(aten.any.dim, value, 1, True),
            Call(aten.all.default, value),
            Call(aten.all.dims, value, [0, 2]),
            Call(aten.count_nonzero.dim_IntList, value, [0]),
        ]
    )


@pytest.mark.filterwarnings(
    "ignore:var\\(\\). degrees of freedom:UserWarning"
)  # the CPU's kernel says so (torch 2.15)
@pytest.mark.parametrize("dtype", FLOATS)
def test_moments(dtype: torch.dtype) -> None:
    value = values(dtype)
    check_all(
        [
            Call(aten.mean.default, value),
            Call(aten.mean.dim, value, [0, 2], True),
        ]
    )
    for name in ("var", "std", "var_mean", "std_mean"):
        overload = getattr(aten, name).correction
        check_all(
            [
                Call(overload, value, [1]),
                Call(overload, value, [0, 2], correction=0, keepdim=True),
            ]
        )
    check_all(
        [
            Call(aten.var.correction, value),
            Call(aten.var.correction, value[:1], [0]),
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype: torch.dtype) -> None:
    value = values(dtype)
    check_all(
        [
            Call(aten.amax.default, value, [0, 1]),
            Call(aten.amin.default, value, [-1], True),
            Call(aten.aminmax.default, value, dim=1),
            Call(aten.max.default, value),
            Call(aten.min.default, value),
        ]
    )
    if dtype != torch.bool:
        check_all(
            [
                Call(aten.argmax.default, value),
                Call(aten.argmin.default, value, 2, True),
            ]
        )
    check_all(
        [
            Call(aten.max.dim, value, 1),
            Call(aten.min.dim, value, -1, True),
        ]
    )


def test_extremes_propagate_nan() -> None:
    value = torch.tensor([[1.0, NAN, 3.0, NAN], [INFINITY, 2.0, -INFINITY, 0.0]])
    for dim in (0, 1):
        check_all(
            [
                Call(aten.max.dim, value, dim),
                Call(aten.min.dim, value, dim),
                Call(aten.argmax.default, value, dim),
                Call(aten.amax.default, value, [dim]),
            ]
        )
    for overload in (aten.sum.default, aten.mean.default, aten.nansum.default, aten.max.default):
        check(overload, value)


def test_reductions_of_zero_dimensional_and_empty_tensors() -> None:
    point, empty = torch.tensor(2.5), torch.zeros(0, 3)
    check_all(
        [
            Call(aten.sum.dim_IntList, point, [0]),
            Call(aten.max.dim, point, 0),
            Call(aten.argmax.default, point),
            Call(aten.cumsum.default, point, 0),
            Call(aten._softmax.default, point, 0, False),
            Call(aten.sum.default, empty),
            Call(aten.mean.default, empty),
            Call(aten.prod.default, empty),
            Call(aten.amax.default, empty, [1]),
            Call(aten.logsumexp.default, empty, [0]),
            Call(aten.any.dims, values(torch.bool), []),
            Call(aten.all.dims, values(torch.bool), []),
        ]
    )


@pytest.mark.parametrize("order", [2, 1, 0, 3, 0.5, INFINITY, -INFINITY])
def test_norms(order: float) -> None:
    for dtype in FLOATS:
        check(aten.linalg_vector_norm.default, values(dtype), order, [1])
    check_all(
        [
            Call(aten.linalg_vector_norm.default, values(torch.float32), order),
            Call(aten.norm.ScalarOpt_dim, values(torch.float32), order, [0, 1], True),
            Call(
                aten.linalg_vector_norm.default, values(torch.bfloat16), order, dtype=torch.float32
            ),
            Call(aten.dist.default, values(torch.float32), values(torch.float32, seed=1), order),
        ]
    )


def test_norm_of_complex() -> None:
    value = torch.complex(values(torch.float32), values(torch.float32, seed=1))
    check_all(
        [
            Call(aten.linalg_vector_norm.default, value, 2, [1]),
            Call(aten.sum.default, value),
            Call(aten.mean.default, value),
            Call(aten.var.correction, value, [1]),
        ]
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_logsumexp_and_softmax(dtype: torch.dtype) -> None:
    value, gradient = values(dtype) * 10, values(dtype, seed=1)
    check_all(
        [
            Call(aten.logsumexp.default, value, [1]),
            Call(aten.logsumexp.default, value, [0, 2], True),
            Call(aten._softmax.default, value, 1, False),
        ]
    )
    # The CPU kernel rounds the sum of exponentials to bfloat16 along the last dimension.
    rough = (1.6e-2, 2e-2) if dtype == torch.bfloat16 else None
    check_all(
        [
            Call(aten._log_softmax.default, value, -1, False, tolerance=rough),
            Call(aten._safe_softmax.default, value, -1),
        ]
    )
    probabilities, logs = torch.softmax(value, 1), torch.log_softmax(value, 1)
    check_all(
        [
            Call(aten._softmax_backward_data.default, gradient, probabilities, 1, dtype),
            Call(aten._log_softmax_backward_data.default, gradient, logs, 1, dtype),
        ]
    )


def test_softmax_of_infinities() -> None:
    value = torch.tensor([[-INFINITY, -INFINITY], [-INFINITY, 1.0], [NAN, 1.0]])
    check_all(
        [
            Call(aten._softmax.default, value, 1, False),
            Call(aten._log_softmax.default, value, 1, False),
            Call(aten._safe_softmax.default, value, 1),
            Call(aten.logsumexp.default, value, [1]),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_running_sums(dtype: torch.dtype) -> None:
    check_all(
        [
            Call(aten.cumsum.default, values(dtype), 1),
            Call(aten.cumsum.default, values(dtype), -1, dtype=torch.float64),
            Call(aten.cumprod.default, values(dtype), 1),
            Call(aten.cummax.default, values(dtype), 1),
            Call(aten.cummin.default, values(dtype), 0),
        ]
    )
    if dtype.is_floating_point:
        check(aten.logcumsumexp.default, values(dtype), 1)


def test_the_running_sum_of_complex_exponentials_does_not_wrap_its_angles() -> None:
    # The larger of two is added to, so that angles stay near those of the operands, beyond pi.
    angles = torch.tensor([3.0, 5.0, -7.0, 9.0, 2.0, -4.0])
    value = torch.complex(torch.tensor([-1.0, 2.0, 0.5, 3.0, 2.9, -8.0]), angles)
    rows = torch.stack([value, value * 0.3, value.flip(0) * 2])
    check_all([Call(aten.logcumsumexp.default, rows, dim) for dim in (0, 1)])
    ends = torch.tensor([complex(-INFINITY, 1.0), complex(-INFINITY, 2.0), 1j, complex(NAN, 0)])
    check(aten.logcumsumexp.default, ends, 0)


def test_running_log_sums_are_rounded_as_often_as_the_cpus() -> None:
    # The gradient is an exponential of it: at 1e4 each rounding more is a thousandth of the gradient.
    draw = torch.Generator().manual_seed(0)
    values = (torch.rand(11, 11, 11, generator=draw) * 2 - 1) * 1e4

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        x.logcumsumexp(1).sum().backward()
        assert x.grad is not None
        return x.grad.cpu().double()

    exact = gradient(values.double())
    error = (gradient(values.to("xla")) - exact).abs().max()
    assert error <= 1.1 * (gradient(values.clone()) - exact).abs().max()
    near = torch.tensor([0.0, -20.0, -30.0])
    assert_agrees_with_cpu(near.to("xla").logcumsumexp(0), near.logcumsumexp(0))
    same = torch.tensor([-INFINITY, -INFINITY, 2.0, INFINITY, INFINITY, -INFINITY, NAN, 1.0])
    check(aten.logcumsumexp.default, same, 0)


def test_running_extremes_keep_nan() -> None:
    value = torch.tensor([1.0, 3.0, 3.0, NAN, 5.0, NAN])
    check_all(
        [
            Call(aten.cummax.default, value, 0),
            Call(aten.cummin.default, value, 0),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_order_statistics(dtype: torch.dtype) -> None:
    value = torch.randperm(60).reshape(3, 4, 5).to(dtype)
    check_all(
        [
            Call(aten.kthvalue.default, value, 2, 1),
            Call(aten.median.default, value),
            Call(aten.median.dim, value, 1, True),
            Call(aten.nanmedian.dim, value, 2),
            Call(
                aten.mode.default, torch.tensor([[1, 2, 2, 3, 3], [5, 4, 4, 4, 5]], dtype=dtype), -1
            ),
        ]
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    "named", [{}, {"dim": 1}, {"dim": (0, -1), "keepdim": True}, {"dim": 7}, {"mode": 3}], ids=str
)
def test_hashes(dtype: torch.dtype, named: dict[str, Any]) -> None:
    with fallbacks() as ran_on_cpu:
        assert_agrees_with_cpu(torch.hash_tensor, values(dtype), **named)
    assert not ran_on_cpu


def test_median_with_nan() -> None:
    value = torch.tensor([[1.0, NAN, 3.0], [2.0, 1.0, 5.0]])
    check_all(
        [
            Call(aten.median.dim, value, 1),
            Call(aten.median.default, value),
            Call(aten.nanmedian.dim, value, 1),
            Call(aten.nanmedian.default, value),
        ]
    )


FACTORY_CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("zeros", ([2, 3],), {"dtype": torch.int32}),
    ("ones", ([2, 3],), {}),
    ("full", ([2], 2.5), {}),
    ("full", ([2], True), {}),
    ("full", ([], 7), {"dtype": torch.bfloat16}),
    ("scalar_tensor", (3.5,), {}),
    ("arange", (7,), {}),
    ("arange", (3.5,), {}),
    ("arange.start", (2, 9), {"dtype": torch.float32}),
    ("arange.start_step", (1.0, 0.0, -0.1), {}),
    ("arange.start_step", (10, -3, -4), {}),
    ("range.step", (1, 4, 0.5), {}),
    ("linspace", (-1.0, 1.0, 7), {}),
    ("linspace", (3, 3, 1), {}),
    ("linspace", (0, 10, 5), {"dtype": torch.int64}),
    ("logspace", (-2, 2, 5), {}),
    # Of whole numbers the ends are whole, the exponents between them are not.
    ("logspace", (0, 4, 6, 2.0), {"dtype": torch.int64}),
    ("logspace", (1.9, 4, 4, 3.0), {"dtype": torch.uint8}),
    ("logspace", (2.5, 4, 1, 3.0), {"dtype": torch.int32}),
    ("eye", (3,), {}),
    ("eye.m", (2, 4), {"dtype": torch.int64}),
    ("tril_indices", (4, 3, 1), {}),
    ("triu_indices", (3, 5, -1), {}),
]


@pytest.mark.parametrize("case", FACTORY_CASES, ids=str)
def test_factories(case: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = case
    check(present(name)[0], *args, **kwargs)


def test_factories_like_a_tensor() -> None:
    like = values(torch.bfloat16, (2, 3))
    check_all(
        [
            Call(aten.zeros_like.default, like),
            Call(aten.ones_like.default, like, dtype=torch.int64),
            Call(aten.full_like.default, like, 2.5),
            Call(aten.new_zeros.default, like, [4]),
            Call(aten.new_ones.default, like, [4], dtype=torch.bool),
            Call(aten.new_full.default, like, [2, 2], -1.5),
        ]
    )
    assert evaluate(aten.empty_like.default, like)[0].shape == (2, 3)
    assert evaluate(aten.empty.memory_format, [5, 1])[0].dtype == torch.float32


@pytest.mark.parametrize("diagonal", [0, 1, -2, 10])
def test_triangles(diagonal: int) -> None:
    for dtype in (torch.float32, torch.bool):
        check_all(
            [
                Call(aten.tril.default, values(dtype), diagonal),
                Call(aten.triu.default, values(dtype), diagonal),
            ]
        )
