"""Joining, repeating, rolling, padding and rearranging against PyTorch's CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import xla_core.lowering.rules as rules
from xla_core.testing.rules import Call
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules


@together
def test_joining() -> Iterator[Call]:
    a, b = torch.randn(2, 3), torch.randn(2, 1)
    yield Call(aten.cat.default, [a, b], 1)
    yield Call(aten.cat.default, [a, a], -2)
    yield Call(aten.cat.default, [torch.zeros(0), a], 0)
    yield Call(aten.cat.default, [torch.zeros(0), torch.zeros(0)])
    yield Call(aten.cat.default, [a, torch.ones(1, 3, dtype=torch.int64)])
    yield Call(aten.cat.default, [torch.ones(2, dtype=torch.int32), torch.ones(2).half()])
    yield Call(aten.stack.default, [a, a], -1)
    yield Call(aten.stack.default, [a, a])
    yield Call(aten.stack.default, [torch.tensor(1.0), torch.tensor(2.0)])
    yield Call(aten.block_diag.default, [a, torch.randn(3), torch.tensor(2.0)])


CASES: list[tuple[Any, ...]] = [
    (aten.roll.default, (3, 4), [1, -2], [0, 1]),
    (aten.roll.default, (3, 4), [5], [-1]),
    (aten.roll.default, (3, 4), [2]),
    (aten.roll.default, (0, 4), [2], [0]),
    (aten.roll.default, (), [1]),
    (aten.flip.default, (3, 4), [0, -1]),
    (aten.flip.default, (3, 4), []),
    (aten.rot90.default, (3, 4, 2), 3, [0, -1]),
    (aten.rot90.default, (3, 4)),
    (aten.repeat.default, (3, 4), [2, 1, 3]),
    (aten.repeat.default, (3,), [0]),
    (aten.repeat.default, (), [2, 2]),
    (aten.constant_pad_nd.default, (3, 4), [1, 2], 2.5),
    (aten.constant_pad_nd.default, (3, 4), [1, -2, -1, 3]),
    (aten.constant_pad_nd.default, (3, 4), [1, 1, 0, 2], -1),
    (aten.pixel_shuffle.default, (2, 12, 3, 4), 2),
    (aten.pixel_unshuffle.default, (2, 3, 6, 4), 2),
    (aten.channel_shuffle.default, (2, 6, 3, 4), 3),
    (aten.unsafe_split.Tensor, (7, 2), 3),
    (aten.split_copy.Tensor, (2, 6), 4, -1),
    (aten.unsafe_split_with_sizes.default, (2, 6), [1, 5], 1),
    (aten.unbind_copy.int, (2, 3), 1),
    (aten.diag_embed.default, (2, 3)),
    (aten.diag_embed.default, (2, 3), -1, 0, 2),
    (aten.diag_embed.default, (2, 3), 2),
    (aten.trace.default, (3, 5)),
    (aten.im2col.default, (2, 3, 7, 6), [3, 2], [1, 2], [1, 0], [2, 1]),
    (aten.im2col.default, (3, 7, 6), [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.col2im.default, (2, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.col2im.default, (2, 12, 9), [5, 6], [2, 2], [1, 2], [1, 1], [2, 2]),
]


@together
def test_rearrangement() -> Iterator[Call]:
    for overload, shape, *args in CASES:
        yield Call(overload, torch.randn(shape), *args)


@together
def test_cross() -> Iterator[Call]:
    yield Call(aten.linalg_cross.default, torch.randn(4, 3), torch.randn(4, 3))
    yield Call(aten.linalg_cross.default, torch.randn(3, 4), torch.randn(3, 1), dim=0)


@together
def test_padding_of_bool_and_int() -> Iterator[Call]:
    yield Call(aten.constant_pad_nd.default, torch.ones(3, dtype=torch.int64), [1, 1], 7)
    yield Call(aten.constant_pad_nd.default, torch.ones(3, dtype=torch.bool), [1, 1])
