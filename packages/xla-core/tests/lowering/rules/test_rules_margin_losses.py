"""Margin losses, fractional pooling, antialiased resizing: rules without PyTorch's meta kernels too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.testing.rules import Call
from xla_core.testing.together import together

aten = torch.ops.aten


@pytest.mark.parametrize("reduction", [0, 1, 2])
@together
def test_multilabel_margin(reduction: int) -> Iterator[Call]:
    torch.manual_seed(0)
    # Repeated targets count repeatedly; what follows a -1 does not count.
    targets = torch.tensor([[3, 0, -1, 1], [2, -1, -1, -1], [1, 1, 3, 0], [-1, 2, 2, 2]])
    for x, target in [(torch.randn(4, 4), targets), (torch.randn(4), targets[0])]:
        yield Call(aten.multilabel_margin_loss_forward.default, x, target, reduction)
        _, is_target = aten.multilabel_margin_loss_forward.default(x, target, reduction)
        grad = torch.randn(target.shape[:-1]) if reduction == 0 else torch.tensor(1.5)
        backward = aten.multilabel_margin_loss_backward.default
        yield Call(backward, grad, x, target, reduction, is_target)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("p", [1, 2])
@together
def test_multi_margin_backward(reduction: int, p: int) -> Iterator[Call]:
    torch.manual_seed(0)
    weight = torch.rand(5)
    for x, target in [
        (torch.randn(4, 5), torch.tensor([0, 4, 2, 2])),
        (torch.randn(5), torch.tensor(3)),
    ]:
        grad = torch.randn(target.shape) if reduction == 0 else torch.tensor(1.5)
        settings = (target, p, 0.8, weight, reduction)
        yield Call(aten.multi_margin_loss_backward.default, grad, x, *settings)
        yield Call(aten.multi_margin_loss.default, x, *settings)


@together
def test_fractional_pooling() -> Iterator[Call]:
    torch.manual_seed(0)
    for rank, size in ((2, (7, 9)), (3, (5, 6, 7))):
        x, samples = torch.randn(2, 3, *size), torch.rand(2, 3, rank)
        x[0, 0, 1] = torch.nan
        settings = ([2] * rank, [3] * (rank - 1) + [1])
        forward = getattr(aten, f"fractional_max_pool{rank}d").default
        yield Call(forward, x, *settings, samples)
        values, places = forward(x, *settings, samples)
        backward = getattr(aten, f"fractional_max_pool{rank}d_backward").default
        yield Call(backward, torch.randn_like(values), x, *settings, places)


@pytest.mark.parametrize(
    "name",
    [
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ],
)
@pytest.mark.parametrize("align_corners", [False, True])
@together
def test_resized_images_are_the_same_bytes(name: str, align_corners: bool) -> Iterator[Call]:
    # The CPU has one kernel for up to four channels and one for more.
    for channels, size in ((3, [5, 20]), (5, [17, 3]), (1, [11, 9])):
        generator = torch.Generator().manual_seed(channels)
        image = torch.randint(0, 256, (2, channels, 11, 8), generator=generator).to(torch.uint8)
        yield Call(getattr(aten, name).default, image, size, align_corners)
    # Wide enough to tell places found in float64 from those found in float32.
    image = torch.randint(0, 256, (1, 1, 150, 270), generator=generator).to(torch.uint8)
    yield Call(getattr(aten, name).default, image, [3, 130], align_corners)


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
@together
def test_antialiasing(kind: str, align_corners: bool) -> Iterator[Call]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    forward = getattr(aten, f"_upsample_{kind}2d_aa").default
    backward = getattr(aten, f"_upsample_{kind}2d_aa_backward").default
    for size, scales in (([5, 3], ()), ([17, 20], ()), ([4, 12], (0.37, 1.5))):
        yield Call(forward, x, size, align_corners, *scales)
        grad = torch.randn(2, 3, *size, dtype=torch.float64)
        yield Call(backward, grad, size, list(x.shape), align_corners, *scales)
