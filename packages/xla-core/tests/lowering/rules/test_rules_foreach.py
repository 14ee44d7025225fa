"""List operators, fused optimizer steps and loss scaling against PyTorch's CPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.lowering.rules.common import find_overload, present
from xla_core.lowering.rules.foreach import UNARY
from xla_core.operators.lowering_registry import Absent
from xla_core.testing.rules import Call, check, check_all

aten = torch.ops.aten

FLOATS = [torch.float32, torch.bfloat16]


def tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Three tensors of different shapes, one of them 0-d, with values in (0.1, 1.1)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3), (), (5,))
    return [(torch.rand(s, generator=generator) + 0.1).to(dtype) for s in shapes]


@pytest.mark.parametrize("name", sorted(name for name in UNARY if present(f"_foreach_{name}")))
def test_unary(name: str) -> None:
    overload = find_overload(f"_foreach_{name}")
    if isinstance(overload, Absent):
        pytest.skip("torch 2.11 has _foreach_clone with out= only")
    check(overload, [value.clamp(max=0.9) for value in tensors(torch.float32)])


BINARY: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    (name, args, {})
    for base in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")
    for name, args in (
        (f"{base}.List", (tensors(torch.float32, 1),)),
        (f"{base}.Scalar", (0.7,)),
        (f"{base}.ScalarList", ([0.5, 1, 2.5],)),
    )
] + [
    ("add.List", (tensors(torch.float32, 1),), {"alpha": -0.1}),
    ("add.Tensor", (torch.tensor(0.5),), {"alpha": 2}),
    ("mul.Tensor", (torch.tensor(0.5),), {}),
    ("div.Tensor", (torch.tensor(0.5),), {}),
    ("lerp.List", (tensors(torch.float32, 1), tensors(torch.float32, 2)), {}),
    ("lerp.Scalar", (tensors(torch.float32, 1), 0.1), {}),
    ("lerp.ScalarList", (tensors(torch.float32, 1), [0.1, 0.6, 0.9]), {}),
]


@pytest.mark.parametrize("case", BINARY, ids=lambda case: case[0])
def test_binary(case: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = case
    check(find_overload(f"_foreach_{name}"), tensors(torch.float32), *args, **kwargs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_fused_multiply(name: str, dtype: torch.dtype) -> None:
    lists = tensors(dtype), tensors(dtype, 1), tensors(dtype, 2)
    check_all(
        [
            Call(find_overload(f"_foreach_{name}.Scalar"), *lists, 0.3),
            Call(find_overload(f"_foreach_{name}.Scalar"), *lists),
            Call(find_overload(f"_foreach_{name}.ScalarList"), *lists, [0.5, 1, -2.0]),
            Call(find_overload(f"_foreach_{name}.Tensor"), *lists, torch.tensor([0.5, 1.0, -2.0])),
        ]
    )


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_norm(order: float) -> None:
    check_all(
        [
            Call(aten._foreach_norm.Scalar, tensors(torch.float32), order),
            Call(aten._foreach_norm.Scalar, tensors(torch.bfloat16), order),
        ]
    )


def test_integers_and_bfloat16_promote_by_element() -> None:
    check_all(
        [
            Call(aten._foreach_add.Scalar, [torch.arange(3), torch.rand(2).bfloat16()], 2),
            Call(aten._foreach_mul.Scalar, [torch.arange(3), torch.rand(2).bfloat16()], 2.5),
            Call(aten._foreach_add.List, [torch.arange(3)], [torch.rand(3)]),
        ]
    )


def test_copy_and_constant_base() -> None:
    check_all(
        [
            Call(aten._foreach_copy.default, tensors(torch.bfloat16), tensors(torch.float32)),
            Call(aten._foreach_pow.ScalarAndTensor, 2.5, tensors(torch.float32)),
        ]
    )


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize("scaling", [None, 0.0, 1.0])
def test_fused_adam(name: str, amsgrad: bool, scaling: float | None) -> None:
    lists = [tensors(torch.float32, seed) for seed in range(4)]
    peaks = tensors(torch.float32, 4) if amsgrad else []
    steps = [torch.tensor(float(step)) for step in (1, 3, 7)]
    options = {
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": amsgrad,
        "maximize": False,
    }
    if scaling is not None:
        options |= {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(scaling)}
    check(find_overload(name), *lists, peaks, steps, **options)
    options["lr"] = torch.tensor(0.01)
    check(find_overload(f"{name}.tensor_lr"), *lists, peaks, steps, **options)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd(momentum: float, first: bool, nesterov: bool) -> None:
    lists = [tensors(torch.float32, seed) for seed in range(2)]
    buffers = tensors(torch.float32, 3) if momentum else []
    if nesterov and not momentum:
        return  # Nesterov's variant needs a momentum
    check(
        aten._fused_sgd.default,
        *lists,
        buffers,
        weight_decay=0.1,
        momentum=momentum,
        lr=0.05,
        dampening=0.0 if nesterov else 0.2,
        nesterov=nesterov,
        maximize=True,
        is_first_step=first,
    )


def test_fused_adagrad() -> None:
    lists = [tensors(torch.float32, seed) for seed in range(3)]
    steps = [torch.tensor(float(step)) for step in (1, 3, 7)]
    check(
        aten._fused_adagrad.default,
        *lists,
        steps,
        lr=0.1,
        lr_decay=0.01,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    )


@pytest.mark.parametrize("bad", [False, True])
def test_loss_scaling(bad: bool) -> None:
    gradients = tensors(torch.float32)
    if bad:
        gradients[2][1] = float("inf")
    check(
        aten._amp_foreach_non_finite_check_and_unscale.default,
        gradients,
        torch.zeros(1),
        torch.tensor([0.5]),
    )
    for tracker in (0, 3):
        check(
            aten._amp_update_scale.default,
            torch.tensor([1024.0]),
            torch.tensor([tracker], dtype=torch.int32),
            torch.tensor([float(bad)]),
            2.0,
            0.5,
            4,
        )
