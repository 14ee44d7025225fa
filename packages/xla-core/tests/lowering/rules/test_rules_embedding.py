"""Embeddings and bags of embeddings against PyTorch's CPU kernels."""

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


@together
def test_embedding() -> Iterator[Call]:
    for shape, kind in itertools.product(
        [(), (5,), (2, 3), (0,), (2, 0)], [torch.int64, torch.int32]
    ):
        index = torch.randint(0, 7, shape, dtype=kind)
        yield Call(aten.embedding.default, torch.randn(7, 4), index)
        yield Call(aten.embedding.default, torch.randn(7, 4).bfloat16(), index, 3)


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@together
def test_embedding_gradient(padding: int, by_frequency: bool, dtype: torch.dtype) -> Iterator[Call]:
    index = torch.randint(0, 7, (3, 9))
    grad = torch.randn(3, 9, 4).to(dtype)
    # PyTorch sums bfloat16 in bfloat16, here it is float32: each addition may round.
    loose = (3e-2, 6e-2) if dtype == torch.bfloat16 else None
    settings = (7, padding, by_frequency)
    yield Call(aten.embedding_dense_backward.default, grad, index, *settings, tolerance=loose)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_bag(mode: str, padding: int, last: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 4, requires_grad=True)
    index = torch.randint(0, 9, (12,))
    offsets = torch.tensor([0, 3, 3, 7, 12] if last else [0, 3, 3, 7])
    number = ["sum", "mean", "max"].index(mode)
    pad = None if padding < 0 else padding
    wanted = torch.nn.functional.embedding_bag(
        index, weight, offsets, mode=mode, include_last_offset=last, padding_idx=pad
    )
    out, bags, sizes, maxima = evaluate(
        aten._embedding_bag.default,
        *(weight.detach(), index, offsets, False, number, False, None, last, padding),
    )
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(wanted)
    (by_weight,) = torch.autograd.grad(wanted, [weight], grad)
    (got,) = evaluate(
        aten._embedding_bag_dense_backward.default,
        *(grad, index, bags, sizes, maxima, 9, False, number, None, padding),
    )
    torch.testing.assert_close(got, by_weight)


def test_weighted_bag() -> None:
    weight = torch.randn(9, 4, requires_grad=True)
    shares = torch.randn(6, requires_grad=True)
    index, offsets = torch.randint(0, 9, (6,)), torch.tensor([0, 2])
    wanted = torch.nn.functional.embedding_bag(
        index, weight, offsets, mode="sum", per_sample_weights=shares
    )
    plain = weight.detach(), index, offsets
    out, bags, sizes, maxima = evaluate(
        aten._embedding_bag.default, *plain, False, 0, False, shares.detach()
    )
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(wanted)
    by_weight, by_shares = torch.autograd.grad(wanted, [weight, shares], grad)
    (got,) = evaluate(
        aten._embedding_bag_backward.default,
        *(grad, index, offsets, bags, sizes, maxima, 9, False, 0, False, shares.detach(), -1),
    )
    torch.testing.assert_close(got, by_weight)
    (got,) = evaluate(
        aten._embedding_bag_per_sample_weights_backward.default,
        *(grad, weight.detach(), index, offsets, bags, 0),
    )
    torch.testing.assert_close(got, by_shares)
