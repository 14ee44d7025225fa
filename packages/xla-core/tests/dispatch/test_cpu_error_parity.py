"""Mistakes on ``xla`` are told as PyTorch tells them on the CPU: the same exception, the same words."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F


def on(device, make):
    return [x.to(device) for x in make()]


def pair():
    return [torch.ones(4, 5), torch.ones(4, 5)]


def matrix():
    return [torch.ones(4, 5)]


def cube():
    return [torch.ones(2, 3, 4)]


def image():
    return [torch.ones(2, 3, 8, 8)]


MISTAKES = {
    "add shapes": (pair, lambda a, b: a + b[:, :3]),
    "in-place shapes": (pair, lambda a, b: a[0].add_(b)),
    "a mask subtracted from bfloat16": (pair, lambda a, b: a.bfloat16().sub_(b > 0)),
    "mm shapes": (pair, lambda a, b: a.mm(b)),
    "mm of vectors": (pair, lambda a, b: a[0].mm(b)),
    "matmul shapes": (pair, lambda a, b: a @ b),
    "bmm shapes": (cube, lambda a: a.bmm(a)),
    "addmm shapes": (pair, lambda a, b: torch.addmm(a, a, b)),
    "mv shapes": (pair, lambda a, b: a.mv(b[:, 0])),
    "dot shapes": (pair, lambda a, b: a[0].dot(b[0, :2])),
    "mm dtypes": (pair, lambda a, b: a.mm(b.t().double())),
    "view": (matrix, lambda a: a.view(3, 7)),
    "view inferred": (matrix, lambda a: a.view(-1, 3)),
    "reshape": (matrix, lambda a: a.reshape(21)),
    "cat": (pair, lambda a, b: torch.cat([a, b[:2, :2]])),
    "cat of nothing": (matrix, lambda a: torch.cat([])),
    "stack": (pair, lambda a, b: torch.stack([a, b[:2]])),
    "dim out of range": (matrix, lambda a: a.sum(2)),
    "softmax dim": (matrix, lambda a: a.softmax(5)),
    "transpose dim": (matrix, lambda a: a.transpose(0, 2)),
    "permute": (matrix, lambda a: a.permute(0, 0)),
    "squeeze dim": (matrix, lambda a: a.squeeze(4)),
    "expand": (matrix, lambda a: a.expand(3, 5)),
    "split size": (matrix, lambda a: a.split([1, 2])),
    "chunk": (matrix, lambda a: a.chunk(0)),
    "index too large": (matrix, lambda a: a[4]),
    "too many indices": (matrix, lambda a: a[0, 0, 0]),
    "mask shape": (matrix, lambda a: a[torch.ones(3, dtype=torch.bool, device=a.device)]),
    "float index": (matrix, lambda a: a[torch.ones(2, device=a.device)]),
    "index shapes": (
        matrix,
        lambda a: a[
            torch.zeros(2, dtype=torch.long, device=a.device),
            torch.zeros(3, dtype=torch.long, device=a.device),
        ],
    ),
    "unpooling by numbers that are no places": (
        cube,
        lambda a: F.max_unpool1d(a, torch.zeros_like(a), 2),
    ),
    "unpooling by int32": (
        image,
        lambda a: F.max_unpool2d(a, torch.zeros_like(a, dtype=torch.int32), 2),
    ),
    "unpooling without planes": (
        cube,
        lambda a: F.max_unpool3d(a, torch.zeros_like(a, dtype=torch.long), 2),
    ),
    "unpooling in steps of none": (
        image,
        lambda a: F.max_unpool3d(a, torch.zeros_like(a, dtype=torch.long), 3, stride=0),
    ),
    "unpooling into a line": (
        image,
        lambda a: torch.ops.aten.max_unpool2d(a, torch.zeros_like(a, dtype=torch.long), [9]),
    ),
    "assigned shape": (pair, lambda a, b: a.__setitem__(0, b)),
    "gather rank": (
        matrix,
        lambda a: a.gather(0, torch.zeros(2, dtype=torch.long, device=a.device)),
    ),
    "gather dtype": (matrix, lambda a: a.gather(0, torch.zeros(2, 2, device=a.device))),
    "index_select": (
        matrix,
        lambda a: a.index_select(3, torch.zeros(2, dtype=torch.long, device=a.device)),
    ),
    "embedding dtype": (matrix, lambda a: F.embedding(a, a)),
    "linear": (pair, lambda a, b: F.linear(a, b[:, :3])),
    "conv channels": (image, lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3, device=x.device))),
    "conv too small": (image, lambda x: F.conv2d(x, torch.ones(2, 3, 9, 9, device=x.device))),
    "pool kernel": (image, lambda x: F.max_pool2d(x, 20)),
    "layer_norm shape": (matrix, lambda a: F.layer_norm(a, (4,))),
    "batch_norm of one value": (matrix, lambda a: F.batch_norm(a[:1], None, None, training=True)),
    "cross_entropy batch": (
        matrix,
        lambda a: F.cross_entropy(a, torch.zeros(3, dtype=torch.long, device=a.device)),
    ),
    "nll dtype": (matrix, lambda a: F.nll_loss(a, torch.zeros(4, device=a.device))),
    "bce shape": (pair, lambda a, b: F.binary_cross_entropy_with_logits(a, b[:2])),
    "dropout p": (matrix, lambda a: F.dropout(a, 1.5)),
    "pad": (matrix, lambda a: F.pad(a, (1, 2, 3))),
    "bitwise of floats": (matrix, lambda a: a & 1),
    "not of floats": (matrix, lambda a: ~a),
    "minus of bools": (matrix, lambda a: (a > 0) - (a > 1)),
    "negative bools": (matrix, lambda a: -(a > 0)),
    "in-place cast": (matrix, lambda a: a.long().add_(0.5)),
    "in-place cast of a tensor": (pair, lambda a, b: a.long().mul_(b)),
    "mean of ints": (matrix, lambda a: a.long().mean()),
    "ints in softmax": (matrix, lambda a: a.long().softmax(0)),
    "max of nothing": (matrix, lambda a: a[:0].max()),
    "argmax of nothing": (matrix, lambda a: a[:0].argmax()),
    "topk": (matrix, lambda a: a.topk(9)),
    "where condition": (pair, lambda a, b: torch.where(a, a, b)),
    "clamp of nothing": (matrix, lambda a: a.clamp()),
    "einsum": (pair, lambda a, b: torch.einsum("ij,jk", a, b)),
    "in-place on expanded": (matrix, lambda a: a[:1].expand(3, 5).add_(1)),
    "normal_ std": (matrix, lambda a: a.normal_(0, -1)),
    "arange": (matrix, lambda a: torch.arange(3, 0, device=a.device)),
    "eye": (matrix, lambda a: torch.eye(-1, device=a.device)),
    "linalg of vectors": (matrix, lambda a: torch.linalg.inv(a)),
    "wrong type": (matrix, lambda a: torch.add(a, "x")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_as_pytorch_tells_them(name):
    make, function = MISTAKES[name]
    with pytest.raises(Exception) as expected:
        function(*on("cpu", make))
    with pytest.raises(expected.type) as caught:
        function(*on("xla", make))
    assert str(caught.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_the_error_points_at_the_line_of_the_operation_and_nothing_is_left_behind():
    x = torch.ones(2, 3, device="xla")
    y = x * 2
    with pytest.raises(RuntimeError) as caught:
        x.mm(x)
    assert caught.traceback[0].path.name == "test_cpu_error_parity.py"
    assert (y + 1).tolist() == [[3] * 3] * 2


def test_adding_nothing_at_no_index_still_looks_at_the_shapes():
    def run(device):
        index = torch.tensor([], dtype=torch.int64, device=device)
        target, source = torch.zeros(0, 1, device=device), torch.zeros(1, 0, device=device)
        with pytest.raises(RuntimeError) as caught:
            target.index_add_(-1, index, source)
        return str(caught.value)

    assert run("cpu") == run("xla")
