"""Activation rules and their gradients against PyTorch's CPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.testing.rules import Call, check, check_all

aten = torch.ops.aten

FLOATS = [torch.float32, torch.float64, torch.bfloat16]


def values(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Finite values on both sides of every bend of an activation."""
    generator = torch.Generator().manual_seed(seed)
    bends = torch.tensor([0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 25.0, -25.0, 0.5, -0.5])
    return torch.cat([bends, torch.randn(20, generator=generator) * 3]).reshape(5, 6).to(dtype)


FORWARD: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.relu.default, (), {}),
    (aten.threshold.default, (0.5, 20.0), {}),
    (aten.leaky_relu.default, (0.2,), {}),
    (aten.hardtanh.default, (), {}),
    (aten.hardtanh.default, (-2, 0.5), {}),
    (aten.elu.default, (1.3, 1.1, 0.7), {}),
    (aten.elu.default, (), {}),
    (aten.celu.default, (1.5,), {}),
    (aten.gelu.default, (), {}),
    (aten.gelu.default, (), {"approximate": "tanh"}),
    (aten.silu.default, (), {}),
    (aten.mish.default, (), {}),
    (aten.hardsigmoid.default, (), {}),
    (aten.hardswish.default, (), {}),
    (aten.softplus.default, (2, 5), {}),
    (aten.softshrink.default, (0.5,), {}),
    (aten.hardshrink.default, (0.5,), {}),
    (aten.glu.default, (-1,), {}),
]

BACKWARD: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.threshold_backward.default, (0,), {}),
    (aten.leaky_relu_backward.default, (0.2, False), {}),
    (aten.hardtanh_backward.default, (-1, 1), {}),
    (aten.gelu_backward.default, (), {}),
    (aten.gelu_backward.default, (), {"approximate": "tanh"}),
    (aten.silu_backward.default, (), {}),
    (aten.mish_backward.default, (), {}),
    (aten.hardsigmoid_backward.default, (), {}),
    (aten.hardswish_backward.default, (), {}),
    (aten.softplus_backward.default, (2, 5), {}),
    (aten.softshrink_backward.default, (0.5,), {}),
    (aten.hardshrink_backward.default, (0.5,), {}),
    (aten.sigmoid_backward.default, (), {}),
    (aten.tanh_backward.default, (), {}),
    (aten.logit_backward.default, (), {}),
    (aten.logit_backward.default, (0.1,), {}),
    (aten.rrelu_with_noise_backward.default, (torch.full((5, 6), 0.3), 0.1, 0.3, True, False), {}),
    (aten.rrelu_with_noise_backward.default, (torch.full((5, 6), 0.3), 0.1, 0.3, False, False), {}),
]

# These CPU kernels round to bfloat16 after each step, where the rule rounds once at the end.
SEVERAL_ROUNDINGS = {
    aten.mish_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.logit_backward.default,
}


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: f"{case[0]}{case[1]}{case[2]}")
def test_forward(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    overload, args, kwargs = case
    check_all([Call(overload, values(dtype), *args, **kwargs) for dtype in FLOATS])


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: f"{case[0]}{len(case[1])}{case[2]}")
def test_backward(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    overload, args, kwargs = case
    calls = []
    for dtype in FLOATS:
        rough = overload in SEVERAL_ROUNDINGS and dtype == torch.bfloat16
        tolerance = (6e-2, 2e-2) if rough else None
        if overload is aten.hardsigmoid_backward.default and dtype == torch.float64:
            tolerance = (1e-7, 0.0)  # the CPU kernel multiplies by a sixth rounded to float32
        given = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
        gradient = values(dtype, 1)
        calls.append(Call(overload, gradient, values(dtype), *given, tolerance=tolerance, **kwargs))
    check_all(calls)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_result", [False, True])
def test_elu_backward(dtype: torch.dtype, is_result: bool) -> None:
    gradient, value = values(dtype, 1), values(dtype)
    check(aten.elu_backward.default, gradient, 1.3, 1.1, 0.7, is_result, value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_prelu_glu_and_log_sigmoid(dtype: torch.dtype) -> None:
    gradient, value = values(dtype, 1), values(dtype)
    weight = torch.rand(1, 6).to(dtype)
    check_all(
        [
            Call(aten._prelu_kernel.default, value, weight),
            Call(aten._prelu_kernel_backward.default, gradient, value, weight),
        ]
    )
    several_roundings = (6e-2, 3e-2) if dtype == torch.bfloat16 else None
    check(aten.glu_backward.default, gradient[:, :3], value, 1, tolerance=several_roundings)
    _, buffer = aten.log_sigmoid_forward.default(value)
    check_all(
        [
            Call(aten.log_sigmoid_forward.default, value),
            Call(aten.log_sigmoid_backward.default, gradient, value, buffer),
        ]
    )


BOUNDED = ["elu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "relu"]


@pytest.mark.parametrize("name", [*BOUNDED, "silu", "softplus", "softshrink"])
def test_infinity_and_nan(name: str) -> None:
    edges = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    check(getattr(aten, name).default, edges)


def test_gelu_of_infinity() -> None:
    # The float32 CPU kernel gives NaN for infinity in one of its code paths; float64 is right.
    check(aten.gelu.default, torch.tensor([float("inf"), float("-inf")], dtype=torch.float64))


def test_gradient_at_nan() -> None:
    edges = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    check_all(
        [
            Call(aten.threshold_backward.default, torch.ones(5), edges, 0),
            Call(aten.hardtanh_backward.default, torch.ones(5), edges, -1, 1),
        ]
    )
