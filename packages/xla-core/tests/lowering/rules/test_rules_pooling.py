"""Pooling, resampling and padding, with gradients, against PyTorch's CPU kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.lowering.rules import window
from xla_core.testing.rules import Call
from xla_core.testing.together import together
from xla_core.torch_bridge.dtypes import to_numpy

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

# input, kernel, stride, padding, dilation, ceil_mode
MAX_CASES: list[tuple[Any, ...]] = [
    ((2, 3, 8, 8), [2, 2], [], [0, 0], [1, 1], False),
    ((3, 9, 7), [2, 3], [2, 3], [0, 0], [1, 1], False),
    ((2, 3, 9, 8), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((2, 3, 9, 8), [3, 2], [2, 1], [1, 1], [1, 2], True),
    ((1, 2, 11, 12), [3, 3], [1, 2], [1, 0], [2, 3], False),
    ((1, 2, 7, 7), [2, 2], [3, 3], [1, 1], [1, 1], True),
    ((1, 2, 6, 6), [2, 2], [4, 4], [0, 0], [1, 1], True),
    ((0, 2, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False),
]


def _plane(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Few distinct values: ties are what the places must agree on.
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.parametrize("case", MAX_CASES, ids=str)
@together
def test_max_pool2d(case: tuple[Any, ...]) -> Iterator[Call]:
    for dtype in [torch.float32, torch.float64, torch.bfloat16]:
        torch.manual_seed(0)
        shape, *settings = case
        x = _plane(shape, dtype)
        yield Call(aten.max_pool2d_with_indices.default, x, *settings)
        if dtype == torch.bfloat16:
            continue
        out, indices = aten.max_pool2d_with_indices(x, *settings)
        grad = torch.randn(out.shape, dtype=dtype)
        yield Call(aten.max_pool2d_with_indices_backward.default, grad, x, *settings, indices)


@pytest.mark.parametrize("by_axis", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 9, 7)], ids=str)
def test_special_values(by_axis: bool, shape: tuple[int, ...]) -> None:
    """Both ways of taking maxima agree with PyTorch on NaN, infinities, zeros and ties."""
    torch.manual_seed(0)
    special = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -0.0, 1.0, -1.0, -math.inf])
    form = window._max_by_axis if by_axis else window._max_packed
    for kernel, stride, padding, dilation in ((2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2)):
        for probability in (0.05, 0.5):
            x = special[torch.randint(1, 8, (4, *shape))]
            x = torch.where(torch.rand(x.shape) < probability, math.nan, x)
            x[0] = -math.inf
            axes = [window.Axis(n, kernel, stride, padding, dilation, False) for n in shape[1:]]
            with jax.enable_x64(True):
                best, place = jax.jit(lambda v, a=axes: form(v, a))(to_numpy(x))
            sizes = [[n, n] for n in (kernel, stride, padding, dilation)]
            want, where = aten.max_pool2d_with_indices(x, *sizes)
            torch.testing.assert_close(
                torch.from_numpy(jax.device_get(best).copy()), want, equal_nan=True, rtol=0, atol=0
            )
            assert (jax.device_get(place) == where.numpy()).all()


@together
def test_integer_max_pool() -> Iterator[Call]:
    for dtype in [torch.uint8, torch.int32, torch.int64]:
        x = torch.randint(0, 9, (1, 2, 7, 7), dtype=dtype)
        yield Call(aten.max_pool2d_with_indices.default, x, [3, 3], [2, 2], [1, 1])


@pytest.mark.parametrize(
    "case",
    [
        ([2, 2, 2], [], [0, 0, 0], [1, 1, 1], False),
        ([3, 2, 3], [2, 1, 2], [1, 0, 1], [1, 2, 1], True),
    ],
    ids=str,
)
@together
def test_max_pool3d(case: tuple[Any, ...]) -> Iterator[Call]:
    x = _plane((2, 2, 6, 7, 8))
    yield Call(aten.max_pool3d_with_indices.default, x, *case)
    out, indices = aten.max_pool3d_with_indices(x, *case)
    grad = torch.randn_like(out)
    stride = case[1] or case[0]
    settings = (case[0], stride, *case[2:], indices)
    yield Call(aten.max_pool3d_with_indices_backward.default, grad, x, *settings)


@pytest.mark.parametrize("divisor", [None, 3])
@pytest.mark.parametrize("geometry", [([2, 2], [], [0, 0]), ([3, 2], [2, 3], [1, 1])], ids=str)
@together
def test_avg_pool2d(divisor: int | None, geometry: tuple[Any, ...]) -> Iterator[Call]:
    x = torch.randn(2, 3, 8, 9)
    for ceil_mode, count_pad in itertools.product((False, True), repeat=2):
        settings = (*geometry, ceil_mode, count_pad, divisor)
        yield Call(aten.avg_pool2d.default, x, *settings)
        grad = torch.randn_like(aten.avg_pool2d(x, *settings))
        stride = geometry[1] or geometry[0]
        tail = (geometry[0], stride, geometry[2], ceil_mode, count_pad, divisor)
        yield Call(aten.avg_pool2d_backward.default, grad, x, *tail)


@together
def test_other_avg_pools() -> Iterator[Call]:
    for ceil_mode, count_pad in itertools.product([False, True], [False, True]):
        yield Call(
            aten.avg_pool1d.default, torch.randn(2, 3, 9), [3], [2], [1], ceil_mode, count_pad
        )
        x = torch.randn(1, 2, 6, 7, 8)
        settings = ([2, 3, 2], [2, 2, 1], [1, 1, 0], ceil_mode, count_pad, None)
        yield Call(aten.avg_pool3d.default, x, *settings)
        grad = torch.randn_like(aten.avg_pool3d(x, *settings))
        yield Call(aten.avg_pool3d_backward.default, grad, x, *settings)


@pytest.mark.parametrize("output", [[1, 1], [2, 4], [3, 5], [8, 9], [10, 3]], ids=str)
@together
def test_adaptive_2d(output: list[int]) -> Iterator[Call]:
    x = _plane((2, 3, 8, 8))
    yield Call(aten._adaptive_avg_pool2d.default, x, output)
    grad = torch.randn(2, 3, *output)
    yield Call(aten._adaptive_avg_pool2d_backward.default, grad, x)
    yield Call(aten.adaptive_max_pool2d.default, x, output)
    indices = aten.adaptive_max_pool2d(x, output)[1]
    yield Call(aten.adaptive_max_pool2d_backward.default, grad, x, indices)


@pytest.mark.parametrize("output", [[1, 1, 1], [2, 3, 5]], ids=str)
@together
def test_adaptive_3d(output: list[int]) -> Iterator[Call]:
    x = _plane((2, 4, 6, 8))
    yield Call(aten._adaptive_avg_pool3d.default, x, output)
    grad = torch.randn(2, *output)
    yield Call(aten._adaptive_avg_pool3d_backward.default, grad, x)
    yield Call(aten.adaptive_max_pool3d.default, x, output)
    indices = aten.adaptive_max_pool3d(x, output)[1]
    yield Call(aten.adaptive_max_pool3d_backward.default, grad, x, indices)


@pytest.mark.parametrize("exact", ["upsample_nearest", "_upsample_nearest_exact"])
@pytest.mark.parametrize("scale", [None, 1.7])
@together
def test_nearest(exact: str, scale: float | None) -> Iterator[Call]:
    sizes = {1: [[12], [7], [4]], 2: [[12, 10], [7, 3]], 3: [[4, 6, 10]]}
    shapes = {1: (2, 3, 6), 2: (2, 3, 6, 5), 3: (1, 2, 2, 3, 5)}
    for rank, outputs in sizes.items():
        forward = getattr(aten, f"{exact}{rank}d").default
        backward = getattr(aten, f"{exact}{rank}d_backward").default
        x = torch.randn(shapes[rank])
        for output in outputs:
            if scale is not None:
                output = [int(n * scale) for n in shapes[rank][2:]]
            scales = [scale] * rank
            yield Call(forward, x, output, *scales)
            grad = torch.randn_like(forward(x, output, *scales))
            yield Call(backward, grad, output, list(x.shape), *scales)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("scale", [None, 1.7])
@pytest.mark.parametrize(
    ("name", "shape", "output"),
    [
        ("upsample_linear1d", (2, 3, 6), [11]),
        ("upsample_bilinear2d", (2, 3, 6, 5), [12, 3]),
        ("upsample_bilinear2d", (2, 3, 6, 5), [1, 5]),
        ("upsample_bicubic2d", (2, 3, 6, 5), [13, 4]),
        ("upsample_trilinear3d", (1, 2, 3, 4, 5), [6, 2, 7]),
    ],
)
@together
def test_interpolation(
    align: bool, scale: float | None, name: str, shape: tuple[int, ...], output: list[int]
) -> Iterator[Call]:
    if scale is not None:
        output = [int(n * scale) for n in shape[2:]]
    scales = [scale] * len(output)
    x, forward = torch.randn(shape), getattr(aten, name).default
    # PyTorch finds the weights in float32, here it is float64.
    yield Call(forward, x, output, align, *scales, tolerance=(1e-4, 1e-5))
    grad = torch.randn_like(forward(x, output, align, *scales))
    backward = getattr(aten, f"{name}_backward").default
    yield Call(backward, grad, output, list(shape), align, *scales, tolerance=(1e-4, 1e-5))
    # Of float64 in float64.
    yield Call(forward, x.double(), output, align, *scales)
    yield Call(backward, grad.double(), output, list(shape), align, *scales)


@pytest.mark.parametrize("mode", ["reflection", "replication"])
@together
def test_padding(mode: str) -> Iterator[Call]:
    for rank, padding in itertools.product([1, 2, 3], [[1, 2, 2, 0, 1, 1], [0, 1, -1, 2, 1, -1]]):
        x, amounts = torch.randn(2, 3, 4, 5, 6)[(0,) * (3 - rank)], padding[: 2 * rank]
        forward = getattr(aten, f"{mode}_pad{rank}d").default
        yield Call(forward, x, amounts)
        grad = torch.randn_like(forward(x, amounts))
        yield Call(getattr(aten, f"{mode}_pad{rank}d_backward").default, grad, x, amounts)


@together
def test_max_unpool() -> Iterator[Call]:
    x = torch.randn(2, 3, 6, 6)
    out, indices = aten.max_pool2d_with_indices(x, [2, 2])
    yield Call(aten.max_unpool2d.default, out, indices, [6, 6])


@pytest.mark.parametrize("mode", [0, 1, 2])
@together
def test_grid_sampler(mode: int) -> Iterator[Call]:
    for padding, align in ((0, False), (1, True), (2, False), (2, True)):
        torch.manual_seed(0)
        settings = (mode, padding, align)
        # Weights are differences of places: half the digits go where an image is wide.
        loose = {"tolerance": (1e-3, 1e-4)}
        x, grid = torch.randn(2, 3, 5, 4), 1.3 * torch.randn(2, 3, 6, 2)
        yield Call(aten.grid_sampler_2d.default, x, grid, *settings, **loose)
        grad = torch.randn(2, 3, 3, 6)
        backward = aten.grid_sampler_2d_backward.default
        yield Call(backward, grad, x, grid, *settings, [True, True], **loose)
        if mode < 2:
            x, grid = torch.randn(2, 3, 5, 4, 3), 1.3 * torch.randn(2, 3, 2, 2, 3)
            yield Call(aten.grid_sampler_3d.default, x, grid, *settings, **loose)
            grad = torch.randn(2, 3, 3, 2, 2)
            backward = aten.grid_sampler_3d_backward.default
            yield Call(backward, grad, x, grid, *settings, [True, True], **loose)


@pytest.mark.parametrize("align", [False, True])
@together
def test_affine_grid(align: bool) -> Iterator[Call]:
    yield Call(aten.affine_grid_generator.default, torch.randn(2, 2, 3), [2, 1, 4, 1], align)
    yield Call(aten.affine_grid_generator.default, torch.randn(2, 3, 4), [2, 1, 4, 3, 2], align)
