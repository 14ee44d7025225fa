"""Convolutions, transposed or not, and their gradients against PyTorch's CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.rules import Call, evaluate
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules

# Sums of a few hundred products round in another order than oneDNN does.
LOOSE = (1e-4, 1e-4)

# input, weight, stride, padding, dilation, transposed, output padding, groups
CASES = [
    ((2, 3, 9), (4, 3, 3), [2], [1], [1], False, [0], 1),
    ((2, 3, 9, 8), (4, 3, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ((2, 3, 9, 8), (4, 3, 3, 2), [2, 3], [2, 0], [2, 1], False, [0, 0], 1),
    ((2, 4, 9, 8), (6, 2, 3, 3), [2, 1], [1, 1], [1, 2], False, [0, 0], 2),
    ((2, 6, 9, 8), (6, 1, 3, 3), [1, 2], [1, 1], [1, 1], False, [0, 0], 6),
    ((2, 6, 9, 8), (12, 1, 3, 3), [1, 1], [1, 0], [2, 1], False, [0, 0], 6),
    ((1, 3, 31), (3, 1, 28), [1], [14], [1], False, [0], 3),
    ((1, 18, 7, 7), (18, 2, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 9),
    ((1, 2, 5, 6, 7), (3, 2, 3, 2, 3), [1, 2, 1], [1, 0, 1], [1, 1, 2], False, [0, 0, 0], 1),
    ((2, 3, 8, 8), (5, 3, 1, 1), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ((2, 4, 5), (4, 3, 3), [2], [1], [1], True, [1], 1),
    ((2, 4, 5, 6), (4, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ((2, 4, 5, 6), (4, 3, 2, 3), [3, 1], [0, 2], [1, 2], True, [2, 1], 1),
    ((2, 4, 5, 6), (4, 3, 3, 3), [2, 1], [1, 1], [1, 1], True, [1, 0], 2),
    ((2, 4, 5, 6), (4, 1, 3, 3), [2, 1], [1, 1], [1, 1], True, [0, 0], 4),
    ((1, 2, 3, 4, 5), (2, 3, 2, 3, 2), [2, 1, 2], [0, 1, 0], [1, 1, 1], True, [1, 0, 0], 1),
]


def _output(shapes: tuple[int, ...], weight: torch.Tensor, settings: list[object]) -> torch.Tensor:
    return torch.randn_like(aten.convolution(torch.zeros(shapes), weight, None, *settings))


@pytest.mark.parametrize("case", CASES, ids=str)
@together
def test_convolution(case: tuple) -> Iterator[Call]:
    torch.manual_seed(0)
    shape, kernel, *settings = case
    x, w = torch.randn(shape), torch.randn(kernel)
    channels = kernel[1] * settings[5] if settings[3] else kernel[0]
    yield Call(aten.convolution.default, x, w, torch.randn(channels), *settings, tolerance=LOOSE)
    yield Call(aten.convolution.default, x, w, None, *settings, tolerance=LOOSE)
    grad = _output(shape, w, settings)
    yield Call(
        aten.convolution_backward.default,
        *(grad, x, w, [channels], *settings, [True, True, True]),
        tolerance=LOOSE,
    )


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_left_out(wanted: int) -> None:
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    settings = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    grad = _output((2, 3, 6, 6), w, settings)
    everything = aten.convolution_backward(grad, x, w, [4], *settings, [True, True, True])
    # PyTorch's kernel computes some gradients that the mask leaves out; the meta kernel does not.
    mask = [place == wanted for place in range(3)]
    got = evaluate(aten.convolution_backward.default, grad, x, w, [4], *settings, mask)
    assert [part is not None for part in got] == mask
    torch.testing.assert_close(got[wanted], everything[wanted], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@together
def test_dtypes(dtype: torch.dtype) -> Iterator[Call]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 6).to(dtype), torch.randn(4, 3, 3, 3).to(dtype)
    settings = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    # One rounding of the result in each library; sums of up to 72 terms of size 1.
    loose = {torch.float64: (1e-9, 1e-9), torch.float16: (5e-3, 2e-2)}.get(dtype, (2e-2, 1e-1))
    yield Call(aten.convolution.default, x, w, torch.randn(4).to(dtype), *settings, tolerance=loose)
    grad = torch.randn(2, 4, 6, 6).to(dtype)
    yield Call(
        aten.convolution_backward.default,
        *(grad, x, w, [4], *settings, [True, True, True]),
        tolerance=loose,
    )


@together
def test_empty_batch() -> Iterator[Call]:
    x, w = torch.zeros(0, 3, 6, 6), torch.randn(4, 3, 3, 3)
    settings = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    yield Call(aten.convolution.default, x, w, torch.randn(4), *settings)
    grad = torch.zeros(0, 4, 4, 4)
    yield Call(aten.convolution_backward.default, grad, x, w, [4], *settings, [True, True, True])
