"""Convolutions, transposed convolutions, and their gradients.

All of them are one linear map and its transposes: a transposed convolution is the transpose of a
convolution in its input, the gradients are the transposes in input and weight. jax writes those
transposes as convolutions again, which for one group is the fastest form on XLA:CPU (measured for
3x3 kernels on 28x28 and 32x32 images: weight gradients through patches and a product take 1.5 to
5 times as long). Grouped convolutions leave Eigen's path there, so they are written otherwise:

* one channel per group: a sum over kernel positions of shifted products (3x3, 32 channels: 0.3 ms
  forward and 0.6 backward against 14.5 and 14.5 ms);
* up to eight groups: one convolution each (4 groups: 2.3, 3.4 and 3.2 ms for result, input and
  weight gradient against 6.7, 28 and 162 ms).

Over a mesh, the weight gradient of more groups is a product per kernel position: XLA's partitioner computes
the convolution that jax writes wrongly, even where only batches are split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.lowering import compile_settings
from xla_core.lowering.rules.common import is_integer
from xla_core.operators import target
from xla_core.operators.lowering_registry import RuleContext, aten, rule
from xla_core.torch_bridge.operands import Operand

# Kernel positions up to which a sum of shifted products wins: for values, for weight gradients.
_MAX_TAPS = 64
_MAX_TAPS_WEIGHT = 25
_MAX_SPLIT_GROUPS = 8

_Pads = Sequence[tuple[int, int]]
_Form = Callable[[Array, Array, Sequence[int], _Pads, Sequence[int], int], Array]


def _layout(rank: int) -> tuple[str, str, str]:
    spatial = "DHW"[3 - rank :]
    return f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"


def _direct(
    x: Array, w: Array, stride: Sequence[int], pads: _Pads, dilation: Sequence[int], groups: int
) -> Array:
    return lax.conv_general_dilated(
        x,
        w,
        tuple(stride),
        pads,
        rhs_dilation=tuple(dilation),
        dimension_numbers=_layout(x.ndim - 2),
        feature_group_count=groups,
        precision=compile_settings.convolution_precision(),
    )


def _split(
    x: Array, w: Array, stride: Sequence[int], pads: _Pads, dilation: Sequence[int], groups: int
) -> Array:
    parts = zip(jnp.split(x, groups, 1), jnp.split(w, groups, 0), strict=True)
    return jnp.concatenate([_direct(a, b, stride, pads, dilation, 1) for a, b in parts], 1)


def _depthwise(
    x: Array, w: Array, stride: Sequence[int], pads: _Pads, dilation: Sequence[int], groups: int
) -> Array:
    multiplier = w.shape[0] // groups
    padded = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(a, b, 0) for a, b in pads])
    kernel = w.shape[2:]
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(padded.shape[2:], kernel, stride, dilation, strict=True)
    ]
    batch = x.shape[0]
    ones = (1,) * len(kernel)
    total = None
    for tap in itertools.product(*map(range, kernel)):
        low = [t * d for t, d in zip(tap, dilation, strict=True)]
        high = [a + (n - 1) * s + 1 for a, n, s in zip(low, out, stride, strict=True)]
        window = lax.slice(padded, (0, 0, *low), (batch, groups, *high), (1, 1, *stride)).reshape(
            batch, groups, 1, *out
        )
        weight = w[(slice(None), 0, *tap)].reshape(groups, multiplier, *ones)
        total = window * weight if total is None else total + window * weight
    assert total is not None  # a kernel of size 0 never gets here: PyTorch refuses it
    return total.reshape(batch, groups * multiplier, *out)


def _form(w: Array, groups: int, max_taps: int) -> _Form:
    if groups > 1 and w.shape[1] == 1 and math.prod(w.shape[2:]) <= max_taps:
        return _depthwise
    return _split if 1 < groups <= _MAX_SPLIT_GROUPS else _direct


def _spread(value: Sequence[int], rank: int) -> tuple[int, ...]:
    """One number per spatial dimension; PyTorch also takes one number for all of them."""
    return tuple(value) * rank if len(value) == 1 else tuple(value)


class _Geometry:
    """The convolution's settings, one number per spatial dimension.

    A transposed convolution is described by the convolution it transposes, whose upper padding
    shrinks by the output padding.
    """

    def __init__(
        self,
        rank: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        output_padding: Sequence[int],
        groups: int,
        transposed: bool,
    ) -> None:
        self.stride = _spread(stride, rank)
        self.dilation = _spread(dilation, rank)
        self.groups = groups
        low = _spread(padding, rank)
        shrink = _spread(output_padding, rank) if transposed else (0,) * rank
        self.pads = tuple((p, p - o) for p, o in zip(low, shrink, strict=True))

    def apply(self, x: Array, w: Array, max_taps: int = _MAX_TAPS) -> Array:
        """The convolution of ``x`` with ``w``."""
        form = _form(w, self.groups, max_taps)
        pads: _Pads = self.pads
        if any(map(is_symbolic, x.shape[2:])):
            x, pads = self._fitted(x, w.shape[2:])
        return form(x, w, self.stride, pads, self.dilation, self.groups)

    def _fitted(self, x: Array, kernel: Sequence[int]) -> tuple[Array, _Pads]:
        """``x`` padded or cut to what the windows cover, and no other padding.

        The gradients of a convolution whose sizes vary are convolutions then that are padded by plain numbers.
        """
        config = []
        settings = (x.shape[2:], kernel, self.stride, self.dilation, self.pads)
        for size, k, stride, dilation, (low, high) in zip(*settings, strict=True):
            reach = dilation * (k - 1) + 1
            count = (size + low + high - reach) // stride + 1
            config.append((low, (count - 1) * stride + reach - size - low, 0))
        zero = np.zeros((), x.dtype)
        return lax.pad(x, zero, [(0, 0, 0)] * 2 + config), ((0, 0),) * len(config)

    def by_input(self, shape: Sequence[int], w: Array, grad: Array) -> Array:
        """The transpose in the input, which has ``shape``."""
        like = jax.ShapeDtypeStruct(tuple(shape), grad.dtype)
        return jax.linear_transpose(lambda x: self.apply(x, w), like)(grad)[0]

    def by_weight(self, x: Array, w: Array, grad: Array) -> Array:
        """The transpose in the weight."""
        here = target.current()
        split = here is not None and here.partitions > 1
        direct = self.groups > 1 and _form(w, self.groups, _MAX_TAPS_WEIGHT) is _direct
        if split and direct and math.prod(w.shape[2:]) <= _MAX_TAPS:
            return self._by_weight_in_groups(x, w, grad)
        function = lambda weight: self.apply(x, weight, _MAX_TAPS_WEIGHT)  # noqa: E731
        return jax.linear_transpose(function, jax.ShapeDtypeStruct(w.shape, w.dtype))(grad)[0]

    def _by_weight_in_groups(self, x: Array, w: Array, grad: Array) -> Array:
        """``by_weight`` of several groups, as one product of all groups per kernel position."""
        kernel, spatial = w.shape[2:], grad.shape[2:]
        zero = np.zeros((), x.dtype)
        padded = lax.pad(x, zero, [(0, 0, 0)] * 2 + [(a, b, 0) for a, b in self.pads])
        grads = grad.reshape(grad.shape[0], self.groups, -1, *spatial)
        summed = (0, *range(3, grads.ndim))
        numbers = ((summed, summed), ((1,), (1,)))
        taps = []
        for tap in itertools.product(*map(range, kernel)):
            low = [t * d for t, d in zip(tap, self.dilation, strict=True)]
            high = [a + (n - 1) * s + 1 for a, n, s in zip(low, spatial, self.stride, strict=True)]
            limits = (*x.shape[:2], *high)
            window = lax.slice(padded, (0, 0, *low), limits, (1, 1, *self.stride))
            window = window.reshape(x.shape[0], self.groups, -1, *spatial)
            precision = compile_settings.convolution_precision()
            taps.append(lax.dot_general(grads, window, numbers, precision))
        return jnp.stack(taps, -1).reshape(w.shape)


def _widen(*operands: Array) -> list[Array]:
    # XLA:CPU sums float16 products in float16; bfloat16 it widens itself.
    return [a.astype(np.float32) if a.dtype == np.float16 else a for a in operands]


@rule(
    aten.convolution.default,
    aten.convolution_overrideable.default,
    context=True,
)
def convolution(
    context: RuleContext,
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """Convolution over the last one to three dimensions; ``transposed`` gives its transpose."""
    meta = context.outputs[0]
    assert meta is not None  # a convolution always has its one result
    if 0 in meta.shape or 0 in input.shape:
        total = jnp.zeros(meta.shape, input.dtype)
    else:
        x, w = _widen(input, weight)
        if transposed and is_integer(x.dtype):
            # jax transposes no function of integers; float64 holds their products exactly
            x, w = x.astype(np.float64), w.astype(np.float64)
        rank = input.ndim - 2
        geometry = _Geometry(rank, stride, padding, dilation, output_padding, groups, transposed)
        total = geometry.by_input(meta.shape, w, x) if transposed else geometry.apply(x, w)
    if bias is not None:
        total = total + bias.astype(total.dtype).reshape(-1, *(1,) * (input.ndim - 2))
    return total.astype(input.dtype)


rule(aten._convolution.default, context=True)(
    lambda context, *args, **kwargs: convolution(context, *args[:9])
)


@rule(aten.convolution_backward.default, aten.convolution_backward_overrideable.default)
def convolution_backward(
    grad_output: Array,
    input: Array,
    weight: Array,
    *settings: Operand,
) -> tuple[Array | None, ...]:
    """Gradients by input, weight and bias; None where the output mask says so."""
    # The two overloads differ only in bias_sizes, which the shape of the gradient tells anyway.
    stride, padding, dilation, transposed, output_padding, groups, mask = settings[-7:]
    rank = input.ndim - 2
    by_input = by_weight = by_bias = None
    empty = 0 in grad_output.shape or 0 in input.shape
    g, x, w = _widen(grad_output, input, weight)
    geometry = _Geometry(rank, stride, padding, dilation, output_padding, groups, transposed)
    if mask[0]:
        by_input = jnp.zeros_like(input)
        if not empty:
            by_input = geometry.apply(g, w) if transposed else geometry.by_input(x.shape, w, g)
    if mask[1]:
        by_weight = jnp.zeros_like(weight)
        if not empty:
            by_weight = geometry.by_weight(g, w, x) if transposed else geometry.by_weight(x, w, g)
    if mask[2]:
        by_bias = jnp.sum(g, axis=(0, *range(2, g.ndim)))
    return by_input, by_weight, by_bias
