"""What random programs with varying dimensions are made of: functions of tensors, and of random choices.

Each takes a ``random.Random`` and its operands. What it draws may depend on ranks, never on sizes: the same choices
are made for all lengths. What it does may depend on sizes, as users' programs do: the traps are of that kind.
Operators that jump (sorting, comparing, rounding) work on whole numbers, so that rounding errors change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F

from xla_core.extension_api.operators import Operand

Operation: TypeAlias = Callable[..., torch.Tensor]


def _dim(draw: random.Random, x: torch.Tensor) -> int:
    return draw.randrange(x.dim())


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Whole numbers: exactly equal on all devices, however the sums before were associated."""
    return torch.floor(x.detach() * 8 + 0.37) if x.is_floating_point() else x


def _index(x: torch.Tensor, most: int) -> torch.Tensor:
    """Indices from 0 to ``most``."""
    return _whole(x).long().abs() % (most + 1)


def _part(draw: random.Random, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    dim = _dim(draw, x)
    start, gone = draw.randrange(3), draw.randrange(3)
    return x.narrow(dim, start, x.shape[dim] - start - gone), dim


UNARY: Final[dict[str, Operation]] = {
    "sin": lambda d, x: x.sin() * d.choice((0.5, 2.0)),
    "gelu": lambda d, x: F.gelu(x),
    "sigmoid": lambda d, x: torch.sigmoid(x) - x,
    "log": lambda d, x: (x.abs() + 0.5).log(),
    "softplus": lambda d, x: F.softplus(x) * 2,
    "sum": lambda d, x: x.sum(_dim(d, x), keepdim=d.random() < 0.6),
    "sum of all": lambda d, x: x.sum() / 8 + x,
    "mean": lambda d, x: x.mean(_dim(d, x), keepdim=d.random() < 0.6),
    "variance": lambda d, x: x.var(_dim(d, x), keepdim=True) + x,
    "norm": lambda d, x: x / (x.norm(dim=_dim(d, x), keepdim=True) + 0.5),
    "product": lambda d, x: (x.sin() + 1.1).prod(_dim(d, x), keepdim=True).clamp(max=9.0),
    "maximum": lambda d, x: x.amax(_dim(d, x), keepdim=d.random() < 0.5),
    "minimum": lambda d, x: x.amin(_dim(d, x)),
    "argmax": lambda d, x: _whole(x).argmax(_dim(d, x), keepdim=d.random() < 0.5),
    "argmin": lambda d, x: _whole(x).argmin(_dim(d, x)),
    "place of the largest": lambda d, x: _whole(x).max(_dim(d, x), keepdim=True).indices + x,
    "softmax": lambda d, x: x.softmax(_dim(d, x)) * 3,
    "log_softmax": lambda d, x: x.log_softmax(_dim(d, x)),
    "logsumexp": lambda d, x: x.logsumexp(_dim(d, x)),
    "layer_norm": lambda d, x: F.layer_norm(x, (x.shape[-1],)),
    "cumsum": lambda d, x: x.cumsum(_dim(d, x)) / 4,
    "cumprod": lambda d, x: (x.sin() + 1.0).cumprod(_dim(d, x)).clamp(max=9.0),
    "cummax": lambda d, x: x.cummax(_dim(d, x)).values,
    "logcumsumexp": lambda d, x: x.logcumsumexp(_dim(d, x)),
    "count": lambda d, x: (_whole(x) > 0).sum(_dim(d, x)),
    "any": lambda d, x: (_whole(x) > 6).any(_dim(d, x)),
    "all": lambda d, x: (_whole(x) > -20).all(_dim(d, x), keepdim=True),
    "sort": lambda d, x: _whole(x).sort(_dim(d, x), descending=d.random() < 0.5).values / 8,
    "argsort": lambda d, x: _whole(x).argsort(dim=_dim(d, x), stable=True),
    "topk": lambda d, x: _whole(x).topk(2, _dim(d, x), largest=d.random() < 0.5).values / 8,
    "flip": lambda d, x: x.flip(_dim(d, x)),
    "roll": lambda d, x: x.roll(d.choice((1, -2, 5)), _dim(d, x)),
    "roll flat": lambda d, x: x.roll(d.choice((1, -2))),
    "flatten": lambda d, x: x.reshape(-1),
    "flatten two": lambda d, x: x.flatten(0, 1),
    "flatten the last two": lambda d, x: x.flatten(-2, -1),
    "flatten and sort": lambda d, x: _whole(x).reshape(-1).sort().values / 8,
    "split the first": lambda d, x: x.unflatten(0, (-1, d.choice((2, 3)))),
    "split the last": lambda d, x: x.unflatten(-1, (d.choice((2, 3, 4)), -1)),
    "of rows of two": lambda d, x: x.reshape(-1, d.choice((2, 3, 4))),
    "transpose": lambda d, x: x.transpose(0, -1),
    "transpose the last": lambda d, x: x.transpose(-2, -1),
    "unsqueeze": lambda d, x: x.unsqueeze(d.randrange(x.dim() + 1)),
    "select": lambda d, x: x.select(_dim(d, x), d.choice((0, 1, -1))),
    "part": lambda d, x: _part(d, x)[0] * 2,
    "first": lambda d, x: x[: d.choice((2, 3, 6))],
    "last": lambda d, x: x[-d.choice((1, 2, 3)) :],
    "every second": lambda d, x: x[:: d.choice((2, 3))],
    "repeat": lambda d, x: x.repeat(*d.choices((1, 2, 3), k=x.dim())),
    "repeat_interleave": lambda d, x: x.repeat_interleave(2, _dim(d, x)),
    "expand": lambda d, x: x.unsqueeze(0).expand(3, *x.shape),
    "expand and flatten": lambda d, x: x.unsqueeze(1).expand(x.shape[0], 2, *x.shape[1:]).flatten(0, 1),
    "pad": lambda d, x: F.pad(x, (d.randrange(3), d.randrange(3)), value=0.25),
    "pad the first": lambda d, x: F.pad(x, (0, 0) * (x.dim() - 1) + (1, 2), value=d.choice((0.0, 3.0))),
    "pad by less": lambda d, x: F.pad(x, (-1, d.choice((0, 2))), value=1.0),
    "tril": lambda d, x: x.tril(d.choice((-1, 0, 1))),
    "triu": lambda d, x: x.triu(d.choice((-1, 0, 2))),
    "diagonal": lambda d, x: x.diagonal(),
    "places": lambda d, x: x + torch.arange(x.shape[-1], device=x.device) / 8,
    "places from the end": lambda d, x: x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
    "zeros": lambda d, x: x + torch.zeros(x.shape[-1], device=x.device, dtype=x.dtype),
    "filled": lambda d, x: x.new_full(x.shape, 1.5) - x,
    "one_hot": lambda d, x: F.one_hot(_index(x, 3), 4),
    "row": lambda d, x: x[_index(x.flatten()[:3], 2)],
    "rows": lambda d, x: x[_index(x.select(-1, 0), 4)],
    "gather": lambda d, x: x.gather(0, _index(x, 4)),
    "take_along": lambda d, x: x.take_along_dim(_whole(x).argsort(dim=0, stable=True), 0),
    "masked_fill": lambda d, x: x.masked_fill(_whole(x) > 2, -1.0),
    "where": lambda d, x: torch.where(_whole(x) > 0, x, x.mean()),
    "scatter": lambda d, x: x.scatter(0, _index(x[:1], 4), 0.5),
    "scatter_add": lambda d, x: x.scatter_add(0, _index(x, 4), x / 2),
    "index_add": lambda d, x: x.index_add(0, _index(x.flatten()[:2], 3), x[-2:]),
    "index_fill": lambda d, x: x.index_fill(0, torch.tensor([0, 2], device=x.device), 0.5),
    "bin": lambda d, x: x.new_zeros(5).index_add(0, _index(x.reshape(-1), 4), x.reshape(-1)),
    "put": lambda d, x: x.index_put((_index(x.flatten()[:2], 3),), x[:2] * 2, accumulate=d.random() < 0.5),
    "write a part": lambda d, x: _written(x, slice(1, -1)),
    "write the last": lambda d, x: _written(x, slice(-2, None)),
    "write a column": lambda d, x: _column(x),
    "rows apart": lambda d, x: x.chunk(2, -1)[0],
    "stack with itself": lambda d, x: torch.stack([x, -x], d.randrange(x.dim() + 1)),
    "cat with a part": lambda d, x: torch.cat([x, x[:2], x], 0),
    "shift by one": lambda d, x: torch.cat([x[1:], x[:1]]) - x,
    "differences": lambda d, x: x.diff(dim=_dim(d, x)),
    "self attention": lambda d, x: F.scaled_dot_product_attention(x, x, x, is_causal=d.random() < 0.5),
    "gram": lambda d, x: (x @ x.transpose(-2, -1)) / 8,
    "covariance": lambda d, x: (x.transpose(-2, -1) @ x) / 8,
    "conv along the last": lambda d, x: _conv(d, x),
    "conv over rows": lambda d, x: _conv(d, x.transpose(-2, -1)),
    "max_pool": lambda d, x: F.max_pool1d(_three(x), d.choice((2, 3)), d.choice((1, 2))),
    "max_pool kept": lambda d, x: F.max_pool1d(_three(x), 3, 1, 1),
    "avg_pool": lambda d, x: F.avg_pool1d(_three(x), d.choice((2, 3)), d.choice((1, 2))),
    "avg_pool kept": lambda d, x: F.avg_pool1d(_three(x), 3, 1, 1, count_include_pad=d.random() < 0.5),
    "pool to one": lambda d, x: F.adaptive_avg_pool1d(_three(x), 1),
    "windows": lambda d, x: x.unfold(_dim(d, x), 2, 1),
    "upsample": lambda d, x: F.interpolate(_three(x), scale_factor=2.0, mode="nearest"),
    "cross_entropy": lambda d, x: F.cross_entropy(x, _index(x.select(-1, 0), 1)),
    "mse": lambda d, x: F.mse_loss(x, x.flip(0)) + x,
    "huber": lambda d, x: F.smooth_l1_loss(x, x.roll(1, 0), reduction=d.choice(("sum", "mean"))) + x,
    "as an integer": lambda d, x: _whole(x).long(),
    "as a float": lambda d, x: x.to(torch.float64) / 4,
    "remainder": lambda d, x: _whole(x).long() % 3 - 1,
    "bits": lambda d, x: _whole(x).long() & 5 | 2,
    # traps: sizes that are values, branches on a length, and what is no multiple of a length
    "divided by the size": lambda d, x: x / x.shape[_dim(d, x)],
    "plus the sizes": lambda d, x: x + x.shape[0] * x.shape[-1] / 16,
    "the size as a power": lambda d, x: x.abs() ** (1 / x.shape[0]),
    "a branch on the length": lambda d, x: x.cos() * 2 if x.shape[_dim(d, x)] > 9 else x.sin(),
    "a number from a branch": lambda d, x: x[: 2 if x.shape[0] > 9 else 3],
    "the first half": lambda d, x: x[: x.shape[0] // 2],
    "the second half": lambda d, x: x[x.shape[0] // 2 :],
    "a branch on equal sizes": lambda d, x: x * 2 if x.shape[0] == x.shape[-1] else x + 1,
    "an element at the size": lambda d, x: x.select(0, x.shape[0] - 2),
    "a mask of the size": lambda d, x: x * (torch.arange(x.shape[-1], device=x.device) < x.shape[0] - 2),
}  # fmt: skip

BINARY: Final[dict[str, Operation]] = {
    "add": lambda d, x, y: x + y,
    "mul": lambda d, x, y: x * y,
    "divide": lambda d, x, y: x / (y.abs() + 0.75),
    "maximum": lambda d, x, y: torch.maximum(x, y),
    "compare": lambda d, x, y: _whole(x) > _whole(y),
    "choose": lambda d, x, y: torch.where(_whole(y) > 1, x, y),
    "lerp": lambda d, x, y: torch.lerp(x, y, 0.25),
    "outer": lambda d, x, y: x.unsqueeze(-1) * y.reshape(-1)[:3],
    "cat": lambda d, x, y: torch.cat([x, y], _dim(d, x)),
    "cat the last": lambda d, x, y: torch.cat([x, y], -1),
    "stack": lambda d, x, y: torch.stack([x, y], d.randrange(x.dim() + 1)),
    "matmul": lambda d, x, y: x @ y / 4,
    "matmul of the transposed": lambda d, x, y: x.transpose(-2, -1) @ y / 4,
    "bilinear": lambda d, x, y: x @ y.transpose(-2, -1) / 4,
    "einsum": lambda d, x, y: torch.einsum("...i,...i->...", x, y),
    "attention": lambda d, x, y: F.scaled_dot_product_attention(x, y, y),
    "attention with a mask": lambda d, x, y: F.scaled_dot_product_attention(
        x, y, y, attn_mask=_whole(x @ y.transpose(-2, -1)) > -9
    ),
    "like rows": lambda d, x, y: y[_index(x, 3)],
    "embedding": lambda d, x, y: F.embedding(_index(x, 2), y),
    "as large as": lambda d, x, y: x.reshape(y.shape),
    "expand as": lambda d, x, y: x.expand_as(y) + 1,
    "first of so many": lambda d, x, y: x[: y.shape[0]],
    "last of so many": lambda d, x, y: x[-y.shape[0] :],
    "write into": lambda d, x, y: _written_with(x, y),
    "scatter into": lambda d, x, y: x.scatter_add(0, _index(y, 1), y),
    "copied": lambda d, x, y: x.clone().copy_(y),
}


def _written(x: torch.Tensor, where: slice) -> torch.Tensor:
    y = x.clone()
    y[where].mul_(-1).add_(1)
    return y


def _written_with(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[: y.shape[0]] = y
    return z


def _column(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[..., 1] = x[..., 0]
    return y


def _three(x: torch.Tensor) -> torch.Tensor:
    """Batch, channels and length."""
    return x.reshape(1, 1, -1) if x.dim() == 1 else x.reshape(-1, *x.shape[-2:])


def _conv(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    x = _three(x)
    kernel = torch.arange(6.0, dtype=x.dtype, device=x.device).view(2, 1, 3).sin()
    kernel = kernel.expand(2, x.shape[1], 3)
    stride, padding, dilation = draw.choice(((1, 0, 1), (1, 1, 1), (2, 1, 1), (1, 2, 2)))
    return F.conv1d(x, kernel, stride=stride, padding=padding, dilation=dilation)


def apply(name: str, seed: int, operands: list[Operand]) -> torch.Tensor:
    """What the operation ``name`` gives for its operands, with the random choices of ``seed``."""
    table = UNARY if len(operands) == 1 else BINARY
    return table[name](random.Random(seed), *operands)
