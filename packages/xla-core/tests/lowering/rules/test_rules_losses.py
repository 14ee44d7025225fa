"""Losses, distances and their gradients against PyTorch's CPU kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.rules import Call
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules


@pytest.mark.parametrize("shape", [(6, 5), (5,), (2, 5, 3, 4)], ids=str)
@together
def test_nll(shape: tuple[int, ...]) -> Iterator[Call]:
    for reduction, weighted in itertools.product([0, 1, 2], [False, True]):
        torch.manual_seed(0)
        flat = len(shape) < 4
        forward = aten.nll_loss_forward.default if flat else aten.nll_loss2d_forward.default
        backward = aten.nll_loss_backward.default if flat else aten.nll_loss2d_backward.default
        scores = torch.randn(shape).log_softmax(1 if len(shape) > 1 else 0)
        target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
        if target.ndim:
            target[0] = -100
        weight = torch.rand(5) if weighted else None
        settings = (target, weight, reduction, -100)
        yield Call(forward, scores, *settings)
        out, total = forward(scores, *settings)
        yield Call(backward, torch.randn_like(out), scores, *settings, total)


@together
def test_nll_ignores_infinite_scores() -> Iterator[Call]:
    scores = torch.tensor([[-math.inf, 0.0], [0.0, -1.0]])
    yield Call(aten.nll_loss_forward.default, scores, torch.tensor([0, 1]), None, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@together
def test_elementwise_losses(dtype: torch.dtype) -> Iterator[Call]:
    for reduction in [0, 1, 2]:
        torch.manual_seed(0)
        x, t = (3 * torch.randn(4, 5)).to(dtype), torch.randn(4, 5).to(dtype)
        # CPU kernels sum bfloat16 losses and scale their gradients in bfloat16, this is float32.
        loose = (2e-2, 2e-2) if dtype == torch.bfloat16 else None
        grad = torch.randn(4, 5).to(dtype) if reduction == 0 else torch.tensor(1.5, dtype=dtype)
        for loss, extra in [
            (aten.mse_loss, ()),
            (aten.smooth_l1_loss, (0.7,)),
            (aten.smooth_l1_loss, (0.0,)),
            (aten.huber_loss, (0.7,)),
            (aten.soft_margin_loss, ()),
        ]:
            if dtype == torch.bfloat16 and loss is aten.soft_margin_loss:
                continue  # its CPU kernel rounds after each of its six steps
            yield Call(loss.default, x, t, reduction, *extra, tolerance=loose)
            backward = getattr(aten, f"{loss._qualified_op_name.split('::')[1]}_backward").default
            yield Call(backward, grad, x, t, reduction, *extra, tolerance=loose)


@together
def test_cross_entropies() -> Iterator[Call]:
    for reduction, weighted in itertools.product([0, 1, 2], [False, True]):
        x, t = torch.rand(4, 5), torch.rand(4, 5)
        x[0, :2], t[0, :2] = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.5])
        weight = torch.rand(4, 5) if weighted else None
        grad = torch.randn(4, 5) if reduction == 0 else torch.tensor(1.5)
        yield Call(aten.binary_cross_entropy.default, x, t, weight, reduction)
        yield Call(aten.binary_cross_entropy_backward.default, grad, x, t, weight, reduction)
        logits, positive = 20 * torch.randn(4, 5), torch.rand(5) if weighted else None
        loss = aten.binary_cross_entropy_with_logits.default
        yield Call(loss, logits, t, weight, positive, reduction)


@together
def test_multi_margin() -> Iterator[Call]:
    for reduction, p in itertools.product([0, 1, 2], [1, 2]):
        x, t, weight = torch.randn(4, 5), torch.tensor([0, 4, 2, 2]), torch.rand(5)
        settings = (t, p, 0.8, weight, reduction)
        yield Call(aten.multi_margin_loss.default, x, *settings)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
@together
def test_distances(p: float) -> Iterator[Call]:
    torch.manual_seed(0)
    a, b = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    a[0, 0] = b[0, 1]
    dist = aten._cdist_forward.default(a, b, p, None)
    yield Call(aten._cdist_forward.default, a, b, p, None)
    # A distance of zero is where the gradients are special; p=0.5 amplifies its neighbours.
    yield Call(
        aten._cdist_backward.default, torch.randn_like(dist), a, b, p, dist, tolerance=(1e-4, 1e-5)
    )
    rows = torch.randn(5, 4)
    dist = aten._pdist_forward.default(rows, p)
    yield Call(aten._pdist_forward.default, rows, p)
    yield Call(
        aten._pdist_backward.default, torch.randn_like(dist), rows, p, dist, tolerance=(1e-4, 1e-5)
    )


@together
def test_many_distances() -> Iterator[Call]:
    a, b = torch.randn(30, 4), torch.randn(40, 4)
    # The product form cancels: half the digits near zero.
    yield Call(aten._cdist_forward.default, a, b, 2.0, None, tolerance=(1e-3, 1e-3))
    yield Call(aten._euclidean_dist.default, a, b, tolerance=(1e-3, 1e-3))
