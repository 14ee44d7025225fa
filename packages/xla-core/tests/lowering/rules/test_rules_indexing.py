"""Indexing, gathering, scattering and sorting against PyTorch's CPU kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.rules import Call, evaluate
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

I = torch.tensor

INDICES: list[list[Any]] = [
    [I([0, -1, 3])],
    [None, I([2, 0])],
    [I([[0, 1], [2, -4]]), I([1, -1])],
    [I([0, 1]), None, I([3, -1])],
    [None, I([[1], [0]]), I([0, 2, -1])],
    [I([], dtype=torch.int64)],
    [I(2)],
    [I([1, 2], dtype=torch.int32)],
    [None, None, I([0, 0])],
]


@together
def test_index() -> Iterator[Call]:
    for indices in INDICES:
        x = torch.randn(4, 3, 5)
        yield Call(aten.index.Tensor, x, indices)
        shape = aten.index(x, indices).shape
        values = torch.randn(shape)
        # Repeated places make the winner of a plain write unspecified: write distinct ones only.
        distinct = not any(
            i is not None and i.numel() > 1 and i.unique().numel() < i.numel() for i in indices
        )
        if distinct:
            yield Call(aten.index_put.default, x, indices, values)
            yield Call(aten.index_put.default, x, indices, torch.tensor(3.0))
        yield Call(aten.index_put.default, x, indices, values, True)
        yield Call(
            aten._unsafe_index_put.default, x.to(torch.int64), indices, values.to(torch.int64), True
        )


@together
def test_index_put_of_flags() -> Iterator[Call]:
    yield Call(
        aten.index_put.default, torch.zeros(4).bool(), [I([0, 2])], torch.tensor([True, False])
    )


@together
def test_masked_indices() -> Iterator[Call]:
    x, index = torch.randn(4, 3), I([0, 9, -9, 2])
    mask = I([True, False, False, True])[:, None]
    yield Call(aten._unsafe_masked_index.default, x, mask, [index, None], 2.5)
    yield Call(
        aten._unsafe_masked_index_put_accumulate.default, x, mask, [index], torch.randn(4, 3)
    )


@pytest.mark.filterwarnings(
    "ignore:index_reduce\\(\\) is in beta:UserWarning"
)  # the CPU's kernel says so (torch 2.15)
@pytest.mark.parametrize("dim", [0, -1])
@together
def test_whole_entries(dim: int) -> Iterator[Call]:
    x, index = torch.randn(4, 4), I([0, 3, 3])
    source = torch.randn(3, 4) if dim == 0 else torch.randn(4, 3)
    yield Call(aten.index_select.default, x, dim, index)
    yield Call(aten.index_add.default, x, dim, index, source)
    yield Call(aten.index_add.default, x, dim, index, source, alpha=-2.5)
    yield Call(aten.index_copy.default, x, dim, index[:2], source.narrow(dim, 0, 2))
    yield Call(aten.index_fill.int_Scalar, x, dim, index, 2.5)
    yield Call(aten.index_fill.int_Tensor, x, dim, index, I(2.5))
    for reduce in ("prod", "mean", "amax", "amin"):
        for include_self in (True, False):
            yield Call(
                aten.index_reduce.default, x, dim, index, source, reduce, include_self=include_self
            )


@together
def test_whole_entries_of_0d() -> Iterator[Call]:
    x = torch.tensor(2.0)
    yield Call(aten.index_select.default, x, 0, I([0]))
    yield Call(aten.index_add.default, x, 0, I([0]), I(3.0))
    yield Call(aten.index_fill.int_Scalar, x, 0, I([0]), 5)
    yield Call(aten.index_copy.default, x, 0, I([0]), I(4.0))


@together
def test_flat_places() -> Iterator[Call]:
    x = torch.randn(4, 3)
    yield Call(aten.take.default, x, I([[0, -1], [7, 3]]))
    yield Call(aten.put.default, x, I([[0, -1], [7, 3]]), torch.randn(2, 2))
    yield Call(aten.put.default, x, I([0, 0, -1]), torch.randn(3), True)


@together
def test_masked_scatter() -> Iterator[Call]:
    x, mask = torch.randn(4, 3), torch.rand(4, 3) > 0.4
    yield Call(aten.masked_scatter.default, x, mask, torch.randn(12))
    yield Call(aten.masked_scatter.default, x, mask[:1], torch.randn(12))
    grad = torch.randn(4, 3)
    got = evaluate(aten.masked_scatter_backward.default, grad, mask, [12])[0]
    wanted = torch.zeros(12)
    wanted[: int(mask.sum())] = grad[mask]
    assert got is not None and torch.equal(got, wanted)


SHAPES = [
    ((4, 5), (3, 5), 0),
    ((4, 5), (4, 1), 1),
    ((4, 5), (4, 1), -1),
    ((4, 5), (2, 3), 1),
    ((2, 3, 4), (2, 2, 4), 1),
    ((), (), 0),
    ((5,), (0,), 0),
]


@pytest.mark.filterwarnings(
    "ignore:The reduce argument of torch.scatter:UserWarning"
)  # the CPU's kernel says so (torch 2.15)
@pytest.mark.parametrize(("shape", "picked", "dim"), SHAPES, ids=str)
@together
def test_gather_and_scatter(
    shape: tuple[int, ...], picked: tuple[int, ...], dim: int
) -> Iterator[Call]:
    for dtype in [torch.float32, torch.int64, torch.bfloat16]:
        torch.manual_seed(0)
        x = (3 * torch.randn(shape)).to(dtype)
        size = shape[dim] if shape else 1
        # Distinct along the dimension, so that a plain write has one possible result.
        order = torch.stack([torch.randperm(size) for _ in range(64)])
        index = order.flatten()[:0].reshape(picked) if 0 in picked else None
        if index is None:
            moved = (
                torch.empty(picked, dtype=torch.int64).movedim(dim, -1)
                if picked
                else torch.zeros(())
            )
            rows = (
                order[: max(moved[..., 0].numel(), 1), : moved.shape[-1]] if picked else order[0, 0]
            )
            index = rows.reshape(moved.shape).movedim(-1, dim) if picked else rows
        index = index.contiguous()
        source = (3 * torch.randn(shape)).to(dtype)
        yield Call(aten.gather.default, x, dim, index)
        yield Call(aten.scatter.src, x, dim, index, source)
        yield Call(aten.scatter.value, x, dim, index, 2)
        yield Call(aten.scatter_add.default, x, dim, index, source)
        yield Call(aten.scatter.reduce, x, dim, index, source, reduce="multiply")
        yield Call(aten.scatter.value_reduce, x, dim, index, 3, reduce="add")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@together
def test_scatter_reduce(dtype: torch.dtype) -> Iterator[Call]:
    for reduce, include_self in itertools.product(
        ["sum", "prod", "mean", "amax", "amin"], [True, False]
    ):
        x, source = (5 * torch.randn(4, 5)).to(dtype), (5 * torch.randn(3, 5)).to(dtype)
        index = torch.randint(0, 4, (3, 4))
        yield Call(aten.scatter_reduce.two, x, 0, index, source, reduce, include_self=include_self)


@together
def test_scatter_add_repeats() -> Iterator[Call]:
    index = torch.randint(0, 4, (9, 5))
    yield Call(aten.scatter_add.default, torch.randn(4, 5), 0, index, torch.randn(9, 5))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("size", [7, 600])
@together
def test_searches(right: bool, size: int) -> Iterator[Call]:
    edges, values = torch.arange(size).float(), torch.randint(-2, 12, (3, 4)).float()
    yield Call(aten.searchsorted.Tensor, edges, values, right=right)
    yield Call(aten.searchsorted.Scalar, edges, 3, right=right)
    yield Call(aten.bucketize.Tensor, values, edges, right=right, out_int32=True)
    yield Call(aten.bucketize.Scalar, 2.5, edges, right=right)
    rows = torch.sort(torch.randint(0, 9, (3, size)).float(), -1)[0]
    yield Call(aten.searchsorted.Tensor, rows, values, side="right" if right else "left")
    mixed = torch.randperm(size)
    yield Call(aten.searchsorted.Tensor, edges[mixed], values, right=right, sorter=mixed.argsort())


@together
def test_isin() -> Iterator[Call]:
    x = torch.randint(0, 5, (3, 4))
    yield Call(aten.isin.Tensor_Tensor, x, I([[1, 3]]))
    yield Call(aten.isin.Tensor_Tensor, x, I([1, 3]), invert=True)
    yield Call(aten.isin.Tensor_Scalar, x, 3)
    yield Call(aten.isin.Scalar_Tensor, 3, x)


@together
def test_repeat_interleave() -> Iterator[Call]:
    yield Call(aten.repeat_interleave.Tensor, I([2, 0, 3]), output_size=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
@together
def test_sort(dtype: torch.dtype) -> Iterator[Call]:
    for dim, descending in itertools.product([0, 1, -1], [False, True]):
        x = torch.randint(0, 4, (5, 6, 7)).to(dtype)
        yield Call(aten.sort.stable, x, stable=True, dim=dim, descending=descending)
        yield Call(aten.sort.default, x[:, :, 0], min(dim, 1), descending)


@together
def test_sort_special_values() -> Iterator[Call]:
    x = I([1.0, torch.nan, -torch.inf, torch.inf, 0.0, torch.nan])
    yield Call(aten.sort.stable, x, stable=True)
    yield Call(aten.sort.stable, x, stable=True, descending=True)
    yield Call(aten.sort.default, I(2.0))
    yield Call(aten.sort.default, torch.zeros(0, 3), 0)
    yield Call(aten.topk.default, x, 3)
    yield Call(aten.topk.default, I([3.0, torch.nan, 1.0, 2.0]), 4, -1, False)


@together
def test_topk() -> Iterator[Call]:
    for dim, largest, dtype in itertools.product(
        [0, -1], [False, True], [torch.float32, torch.int64, torch.uint8]
    ):
        # All different: PyTorch leaves open which of equal values comes first.
        x = torch.stack([torch.randperm(8) for _ in range(8)])
        x = x if dim == -1 else x.T.contiguous()
        yield Call(aten.topk.default, x.to(dtype), 3, dim, largest)


@together
def test_topk_of_0d() -> Iterator[Call]:
    yield Call(aten.topk.default, I(2.0), 1)
