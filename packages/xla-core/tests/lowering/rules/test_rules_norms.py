"""Normalisations and their gradients against PyTorch's CPU kernels."""

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

# Sums over a few hundred elements in another order.
LOOSE = (1e-4, 1e-5)


def _close(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None and want is not None
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=LOOSE[0], atol=LOOSE[1], equal_nan=True)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("affine", "momentum"), [(True, 0.1), (False, 1.0)])
@together
def test_batch_norm(
    shape: tuple[int, ...], training: bool, affine: bool, momentum: float
) -> Iterator[Call]:
    x = torch.randn(shape) * 2 + 3
    weight, bias = (torch.randn(3), torch.randn(3)) if affine else (None, None)
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    new_mean, new_var = mean.clone(), var.clone()
    want = aten.native_batch_norm(x, weight, bias, new_mean, new_var, training, momentum, 1e-5)
    functional = aten._native_batch_norm_legit_functional.default
    got = evaluate(functional, x, weight, bias, mean, var, training, momentum, 1e-5)
    for one, other in zip(got, (want[0], None, None, new_mean, new_var), strict=True):
        if other is not None:
            _close(one, other)
    if training:
        _close(got[1], want[1])
        _close(got[2], want[2])
    settings = (weight, new_mean, new_var, want[1], want[2], training, 1e-5, [True] * 3)
    yield Call(
        aten.native_batch_norm_backward.default,
        *(torch.randn(shape), x, *settings),
        tolerance=LOOSE,
    )


@together
def test_batch_norm_without_statistics() -> Iterator[Call]:
    x = torch.randn(4, 3, 5)
    yield Call(
        aten._native_batch_norm_legit.no_stats,
        *(x, torch.randn(3), torch.randn(3), True, 0.1, 1e-5),
        tolerance=LOOSE,
    )


def test_batch_norm_of_nothing() -> None:
    nothing = torch.zeros(0)
    for device in ("cpu", "xla"):
        x = nothing.to(device)
        assert torch.nn.functional.batch_norm(x, x, x).tolist() == []


def test_other_batch_norms() -> None:
    x, weight, bias = torch.randn(4, 3, 5), torch.randn(3), torch.randn(3)
    stats = torch.randn(3), torch.rand(3) + 0.5
    for overload in (
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_no_update.default,
        aten._batch_norm_with_update_functional.default,
    ):
        got = evaluate(overload, x, weight, bias, *stats, 0.1, 1e-5)
        want = overload(x, weight, bias, *(s.clone() for s in stats), 0.1, 1e-5)
        _close(got[0], want[0])
    _close(got[4], want[4])
    _close(got[5], want[5])


def test_batch_norm_in_bfloat16() -> None:
    x = torch.randn(4, 3, 5).bfloat16()
    mean, var = torch.zeros(3), torch.ones(3)
    functional = aten._native_batch_norm_legit_functional.default
    out = evaluate(functional, x, torch.ones(3), torch.zeros(3), mean, var, True, 0.1, 1e-5)[0]
    want = torch.nn.functional.batch_norm(x.float(), None, None, training=True)
    # One rounding to bfloat16.
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)
    saved = x.float().mean((0, 2)), x.float().var((0, 2), unbiased=False).add(1e-5).rsqrt()
    grad = torch.randn(4, 3, 5).bfloat16()
    settings = (torch.ones(3), mean, var, *saved, True, 1e-5, [True, True, True])
    got = evaluate(aten.native_batch_norm_backward.default, grad, x, *settings)
    want = aten.native_batch_norm_backward(grad.float(), x.float(), *settings)
    for one, other in zip(got, want, strict=True):
        assert one is not None
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)


@together
def test_layer_norm() -> Iterator[Call]:
    for normalized, affine in itertools.product([[6], [4, 6]], [True, False]):
        x = torch.randn(3, 4, 6) * 2 + 3
        weight, bias = (
            (torch.randn(normalized), torch.randn(normalized)) if affine else (None, None)
        )
        yield Call(
            aten.native_layer_norm.default, x, normalized, weight, bias, 1e-5, tolerance=LOOSE
        )
        _, mean, rstd = aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
        mask = [True, affine, affine]
        yield Call(
            aten.native_layer_norm_backward.default,
            *(torch.randn(3, 4, 6), x, normalized, mean, rstd, weight, bias, mask),
            tolerance=LOOSE,
        )


@together
def test_group_norm() -> Iterator[Call]:
    for affine, groups in itertools.product([True, False], [1, 2, 6]):
        x = torch.randn(3, 6, 4, 5) * 2 + 3
        weight, bias = (torch.randn(6), torch.randn(6)) if affine else (None, None)
        sizes = (3, 6, 20, groups)
        yield Call(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-5, tolerance=LOOSE)
        _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
        mask = [True, affine, affine]
        yield Call(
            aten.native_group_norm_backward.default,
            *(torch.randn(3, 6, 4, 5), x, mean, rstd, weight, *sizes, mask),
            tolerance=LOOSE,
        )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(affine: bool, eps: float | None) -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    weight = torch.randn(6, requires_grad=True) if affine else None
    want = torch.nn.functional.rms_norm(x, [6], weight, eps)
    scale = None if weight is None else weight.detach()
    out, rstd = evaluate(aten._fused_rms_norm.default, x.detach(), [6], scale, eps)
    _close(out, want.detach())
    grad = torch.randn(3, 4, 6)
    wanted = torch.autograd.grad(want, [x, weight] if affine else [x], grad)
    mask = [True, affine]
    got = evaluate(aten._fused_rms_norm_backward.default, grad, x.detach(), [6], rstd, scale, mask)
    for one, other in zip(got, wanted, strict=False):
        _close(one, other)


@pytest.mark.parametrize("dim", [0, 2])
@together
def test_weight_norm(dim: int) -> Iterator[Call]:
    v = torch.randn(4, 3, 5)
    g = torch.randn(4, 1, 1) if dim == 0 else torch.randn(1, 1, 5)
    yield Call(aten._weight_norm_interface.default, v, g, dim)
    _, norms = aten._weight_norm_interface(v, g, dim)
    grad = torch.randn(4, 3, 5)
    yield Call(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@together
def test_renorm(p: float) -> Iterator[Call]:
    yield Call(aten.renorm.default, torch.randn(4, 3, 2), p, 1, 2.5)
    yield Call(aten.renorm.default, torch.randn(4, 3, 2), p, -1, 0.1)
