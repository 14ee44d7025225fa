"""Resizing with antialiasing: when an image shrinks, the filter grows with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax import Array
from torch._ops import OpOverload

from xla_core.lowering.rules.common import opmath
from xla_core.lowering.rules.window import separable, transposed
from xla_core.operators.lowering_registry import aten, rule

_Filter = Callable[[np.ndarray], np.ndarray]

# The cubic kernel's parameter with antialiasing (Pillow's choice, where plain bicubic has -0.75).
_CUBIC_A = -0.5


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    d = np.abs(x)
    near = ((_CUBIC_A + 2) * d - (_CUBIC_A + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * _CUBIC_A - 4 * _CUBIC_A
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _step(size: int, count: int, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1 / scale if scale else size / count


def _matrix(
    size: int, count: int, align_corners: bool, scale: float | None, kernel: _Filter, width: int
) -> np.ndarray:
    """The ``[count, size]`` weights of one dimension; ``width`` is the filter's at scale 1."""
    step = _step(size, count, align_corners, scale)
    stretch = max(step, 1.0)
    support = width / 2 * stretch
    center = step * (np.arange(count) + 0.5)
    # astype cuts towards zero, as the cast in PyTorch's kernel does
    low = np.maximum((center - support + 0.5).astype(np.int64), 0)
    high = np.minimum((center + support + 0.5).astype(np.int64), size)
    place = np.arange(size)
    weights = kernel((place - center[:, None] + 0.5) / stretch)
    weights = np.where((place >= low[:, None]) & (place < high[:, None]), weights, 0)
    total = weights.sum(1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _matrices(
    sizes: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    kernel: _Filter,
    width: int,
) -> list[np.ndarray | None]:
    settings = zip(sizes, counts, scales, strict=True)
    return [_matrix(n, m, align_corners, s, kernel, width) for n, m, s in settings]


def _register(forward: OpOverload, backward: OpOverload, kernel: _Filter, width: int) -> None:
    def resize(
        self: Array,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Array:
        scales = (scales_h, scales_w)
        chosen = _matrices(self.shape[2:], output_size, align_corners, scales, kernel, width)
        return separable(opmath(self), chosen)

    def resize_backward(
        grad_output: Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Array:
        scales = (scales_h, scales_w)
        chosen = _matrices(input_size[2:], output_size, align_corners, scales, kernel, width)
        return separable(opmath(grad_output), transposed(chosen))

    rule(forward)(resize)
    rule(backward)(resize_backward)


_register(
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa_backward.default,
    _triangle,
    2,
)
_register(
    aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default, _cubic, 4
)
_register(
    aten._upsample_lanczos2d_aa.default, aten._upsample_lanczos2d_aa_backward.default, _lanczos, 6
)
