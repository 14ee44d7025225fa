"""Operators whose operands vary in length are served by one program, and give what PyTorch gives.

The padding is NaN or a wild index (``conftest``): an operator that looked at it would show it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from xla_core.varying import families

LENGTHS = (5, 9, 7, 12, 6, 11)


def written(x, where):
    y = x * 2
    y[where] = x[where]
    return y


STEPS = {
    "elementwise": lambda x: x.sin() * 2 + x,
    "broadcast": lambda x: x + x[:1] * x[:, :1],
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "product": lambda x: x.prod(0),
    "max": lambda x: tuple(x.max(0)),
    "min": lambda x: x.amin(0),
    "any": lambda x: (x > 0).any(0),
    "all": lambda x: (x > -9).all(0),
    "argmax": lambda x: x.argmax(0),
    "argmin of all": lambda x: x.argmin(),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "variance": lambda x: x.var(0),
    "norm": lambda x: x.norm(),
    "layer_norm": lambda x: F.layer_norm(x.t(), (x.shape[0],)),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: tuple(x.cummax(0)),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "sort": lambda x: tuple(x.sort(0)),
    "sort down": lambda x: x.sort(0, descending=True).values,
    "matmul contracted": lambda x: x.t() @ x,
    "matmul free": lambda x: x @ x.t(),
    "bmm": lambda x: torch.bmm(x[None], x.t()[None]),
    "addmm": lambda x: torch.addmm(x[:, :1], x, x[:4] @ x[:4].t()),
    "flatten": lambda x: x.reshape(-1).cumsum(0),
    "flatten and back": lambda x: (x.reshape(-1) * 2).reshape(x.shape).sum(0),
    "batched": lambda x: x.reshape(-1, 2, 2).transpose(0, 1).reshape(-1, 2) * 2,
    "expand": lambda x: x[None].expand(3, -1, -1).reshape(-1, 4).sum(0),
    "expand and reorder": lambda x: x[None].expand(3, -1, -1).reshape(-1, 4).flip(0),
    "permute": lambda x: x[None].permute(2, 1, 0) * 3,
    "repeat": lambda x: x.repeat(2, 3),
    "arange": lambda x: x * torch.arange(x.shape[0], device=x.device)[:, None],
    "size as a value": lambda x: x.sum() / x.shape[0],
    "full": lambda x: torch.full((x.shape[0], 4), 7.0, device=x.device) + x,
    "tril": lambda x: (x @ x.t()).tril(),
    "masked_fill": lambda x: (x @ x.t()).masked_fill(x[:, :1] > 0, -1.0),
    "where": lambda x: torch.where(x > 0, x, x.mean()),
    "cut from the end": lambda x: x[-1] + x[-2:].sum(0),
    "cut both ends": lambda x: x[1:-1] * 2,
    "concatenation": lambda x: torch.cat([x, x[:2], x]),
    "stack": lambda x: torch.stack([x, x + 1]),
    "chunks": lambda x: (x.t() + 1).split(2)[1] * 2,
    "flip": lambda x: x.flip(0) + 1,
    "roll": lambda x: x.roll(1, 0),
    "pad": lambda x: F.pad(x, (1, 1, 2, 3), value=5.0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 2, 1], device=x.device)),
    "index": lambda x: x[torch.tensor([0, -1], device=x.device)],
    "gather": lambda x: x.gather(0, (x.abs() * 2).long().clamp(max=4)),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 1], device=x.device), x[:2]),
    "scatter": lambda x: x.scatter(0, (x[:2].abs() * 2).long().clamp(max=4), 9.0),
    "embedding": lambda x: F.embedding((x.abs() * 3).long().clamp(max=4), x[:5]),
    "top k": lambda x: tuple(x.topk(2, 0)),
    "counted down": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
    "one_hot": lambda x: F.one_hot((x.abs() * 3).long().clamp(max=4), 5),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % 4),
    "mse": lambda x: F.mse_loss(x, x.flip(0)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        *[x[None, None]] * 3, is_causal=True
    ),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        *[x[None, None]] * 3, attn_mask=(x[:, 0] > x.min())[None, None, None]
    ),
    "a write into a part": lambda x: x.clone().index_fill_(1, torch.tensor([1], device=x.device), 0.0),
    "a write at the end": lambda x: written(x, slice(-2, None)),
    "a write up to the end": lambda x: written(x, slice(1, -1)),
    "stack in the middle": lambda x: torch.stack([x, x + 1], 1).sum(0),
    "padding that repeats": lambda x: F.pad(x[None], (0, 0, 2, 1), mode="replicate"),
    "padding that goes round": lambda x: F.pad(x.t()[None], (2, 1), mode="circular"),
    "convolution of a batch": lambda x: F.conv1d(x[:, None], x[:2, None, :2]),
    "convolution along": lambda x: F.conv1d(x.t()[None], x[:3].t()[None], padding=1),
    "convolution along, dilated": lambda x: F.conv1d(x.t()[None], x[:2].t()[None], padding=2, dilation=2),
    "pooling of a batch": lambda x: F.max_pool1d(x[:, None], 2),
    "pooling along": lambda x: F.max_pool1d(x.t()[None], 3, 1, 1),
    "pooling along, without padding": lambda x: F.max_pool1d(x.t()[None], 2, 1),
    "pooling of images": lambda x: F.max_pool2d(x[None].expand(2, -1, -1), 3, 1, 1),
    "averages along": lambda x: F.avg_pool1d(x.t()[None], 3, 1),
    "averages along, with padding": lambda x: F.avg_pool1d(x.t()[None], 3, 1, 1),
    "averages of what is there": lambda x: F.avg_pool1d(x.t()[None], 3, 1, 1, count_include_pad=False),
    "average of all": lambda x: F.adaptive_avg_pool1d(x.t()[None], 1),
    "averages of a grid": lambda x: F.adaptive_avg_pool2d(x.t()[None], (2, 3)),
    "averages of a grid of as many": lambda x: F.adaptive_avg_pool2d((x @ x.t())[None], (9, 2)),
    "buckets": lambda x: torch.bucketize(x, x[:, 0].sort().values, right=True),
    "the bucket of a number": lambda x: torch.bucketize(x[0, 0], x[:, 0].sort().values),
    "buckets of what varies": lambda x: torch.bucketize(x, x[0].sort().values),
    "places in a sorted sequence": lambda x: torch.searchsorted(*[x.t().sort(1).values.contiguous()] * 2),
    "the square of a length": lambda x: (x @ x.t()).flatten().cumsum(0),
    "parts of squares": lambda x: (x @ x.t()).repeat(2, 3).flatten().view(-1, x.shape[0]).sum(0),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_one_program_serves_several_lengths_exactly(name, run_lengths):
    torch.manual_seed(0)
    served = run_lengths(STEPS[name], lambda n: (torch.randn(n, 4),), LENGTHS)
    assert served == len(LENGTHS) - 2, families.kept_out()


GRADIENTS = {
    "softmax": lambda x: x.softmax(0)[0],
    "matmul": lambda x: x @ (x.t() @ x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % 4),
    "mean": lambda x: x.mean() * x.var(0),
    "slices": lambda x: x[1:-1] * x[:-2],
    "concatenation": lambda x: torch.cat([x, x[:2] * 3, x]),
    "gather": lambda x: x.gather(0, (x.detach().abs() * 2).long().clamp(max=4)),
    "cumsum": lambda x: x.cumsum(0),
    "gelu": lambda x: F.gelu(x.reshape(-1)),
    "padding that reflects": lambda x: F.pad(x.t()[None], (2, 1), mode="reflect"),
    "a part from a varying place on": lambda x: torch.cat([x, x])[x.shape[0] - 1 :],
    "pooling along": lambda x: F.max_pool1d(x.t()[None], 3, 1, 1),
    "averages along": lambda x: F.avg_pool1d(x.t()[None], 3, 1, 1, count_include_pad=False),
    "convolution along": lambda x: F.conv1d(x.t()[None], x[:3].t()[None], padding=1),
    "average of all": lambda x: F.adaptive_avg_pool1d(x.t()[None], 1),
    "averages of a grid": lambda x: F.adaptive_avg_pool2d(x.t()[None], (2, 3)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_length_itself(name, run_lengths):
    def step(x):
        x = x.detach().requires_grad_()
        GRADIENTS[name](x).square().sum().backward()
        return x.grad

    torch.manual_seed(1)
    served = run_lengths(step, lambda n: (torch.randn(n, 4),), LENGTHS)
    assert served == len(LENGTHS) - 2, families.kept_out()
