"""Padding by reflection and by repeating the edge, over the last one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from xla_core.operators.lowering_registry import aten, rule


def _pad(x: Array, padding: Sequence[int], mode: str) -> Array:
    amounts = [(0, 0)] * x.ndim
    for place in range(len(padding) // 2):
        amounts[x.ndim - 1 - place] = (padding[2 * place], padding[2 * place + 1])
    # A negative amount cuts; PyTorch cuts and pads as one map from places to places.
    whole = jnp.pad(x, [(max(a, 0), max(b, 0)) for a, b in amounts], mode=mode)
    for axis, (low, high) in enumerate(amounts):
        if low < 0 or high < 0:
            size = whole.shape[axis]
            whole = lax.slice_in_dim(whole, max(-low, 0), size - max(-high, 0), axis=axis)
    return whole


def _rule(mode: str) -> Callable[[Array, Sequence[int]], Array]:
    def forward(self: Array, padding: Sequence[int]) -> Array:
        return _pad(self, padding, mode)

    return forward


def _backward_rule(mode: str) -> Callable[[Array, Array, Sequence[int]], Array]:
    def backward(grad_output: Array, self: Array, padding: Sequence[int]) -> Array:
        # Padding is linear, and jax knows the transposes of the slices it is made of.
        like = jax.ShapeDtypeStruct(self.shape, grad_output.dtype)
        return jax.linear_transpose(lambda x: _pad(x, padding, mode), like)(grad_output)[0]

    return backward


rule(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)(
    _rule("reflect")
)
rule(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default
)(_rule("edge"))
rule(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)(_backward_rule("reflect"))
rule(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)(_backward_rule("edge"))
