"""Views that copy, writes into views as functions, and the gradients of views.

Every rule here is one that a view operator has, under the name of an operator that makes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from torch._ops import OpOverload

from xla_core.lowering.rules.views import (
    MAX_UNROLLED_WINDOW,
    slice_bounds,
    window_positions,
    wrap_dim,
)
from xla_core.operators.lowering_registry import aten, find_view, rule

_COPIES: Final = {
    aten._unsafe_view.default: aten.view.default,
    aten._reshape_copy.default: aten.view.default,
    aten.view_copy.default: aten.view.default,
    aten.view_copy.dtype: aten.view.dtype,
    aten.alias_copy.default: aten.alias.default,
    aten.detach_copy.default: aten.detach.default,
    aten.t_copy.default: aten.t.default,
    aten.transpose_copy.int: aten.transpose.int,
    aten.permute_copy.default: aten.permute.default,
    aten.select_copy.int: aten.select.int,
    aten.slice_copy.Tensor: aten.slice.Tensor,
    aten.unsqueeze_copy.default: aten.unsqueeze.default,
    aten.squeeze_copy.default: aten.squeeze.default,
    aten.squeeze_copy.dim: aten.squeeze.dim,
    aten.squeeze_copy.dims: aten.squeeze.dims,
    aten.expand_copy.default: aten.expand.default,
    aten.diagonal_copy.default: aten.diagonal.default,
    aten.unfold_copy.default: aten.unfold.default,
    aten.as_strided_copy.default: aten.as_strided.default,
    aten.view_as_real_copy.default: aten.view_as_real.default,
    aten.view_as_complex_copy.default: aten.view_as_complex.default,
    aten._conj_copy.default: aten._conj.default,
    aten.resolve_conj.default: aten.alias.default,
    aten.resolve_neg.default: aten.alias.default,
}


def _get(view: OpOverload) -> Callable[..., Array]:
    rule = find_view(view)
    if rule is None:
        raise LookupError(f"{view} has no view rule; register it in {wrap_dim.__module__}")
    return rule.get


def _put(view: OpOverload) -> Callable[..., Array]:
    rule = find_view(view)
    if rule is None or rule.put is None:
        raise LookupError(f"{view} cannot be written; register it in {wrap_dim.__module__}")
    return rule.put


for _copy, _view in _COPIES.items():
    rule(_copy)(_get(_view))


def _zero(like: Array) -> np.ndarray:
    return np.zeros((), like.dtype)


@rule(aten.slice_scatter.default)
def slice_scatter(
    self: Array,
    src: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    """``self`` with the slice replaced by ``src``."""
    axis = wrap_dim(dim, self.ndim)
    length = slice_bounds(self.shape[axis], start, end, step)[2]
    shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
    value = jnp.broadcast_to(src.astype(self.dtype), shape)
    return _put(aten.slice.Tensor)(self, value, axis, start, end, step)


@rule(aten.select_scatter.default)
def select_scatter(self: Array, src: Array, dim: int, index: int) -> Array:
    """``self`` with one index of ``dim`` replaced by ``src``."""
    return _put(aten.select.int)(self, src.astype(self.dtype), dim, index)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(
    self: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    """``self`` with a diagonal replaced by ``src``."""
    return _put(aten.diagonal.default)(self, src.astype(self.dtype), offset, dim1, dim2)


@rule(aten.as_strided_scatter.default)
def as_strided_scatter(
    self: Array,
    src: Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    """``self`` with the strided window replaced by ``src``."""
    return _put(aten.as_strided.default)(self, src.astype(self.dtype), size, stride, storage_offset)


@rule(aten.slice_backward.default)
def slice_backward(
    grad_output: Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Array:
    """The gradient of ``slice``: zeros around and between the gradient's elements."""
    dim = wrap_dim(dim, len(input_sizes))
    size = input_sizes[dim]
    low, _, length = slice_bounds(size, start, end, step)
    if length == 0:
        return jnp.zeros(tuple(input_sizes), grad_output.dtype)
    config = [(0, 0, 0)] * len(input_sizes)
    config[dim] = (low, size - low - (length - 1) * step - 1, step - 1)
    return lax.pad(grad_output, _zero(grad_output), config)


@rule(aten.select_backward.default)
def select_backward(grad_output: Array, input_sizes: Sequence[int], dim: int, index: int) -> Array:
    """The gradient of ``select``: zeros everywhere but at ``index``."""
    dim = wrap_dim(dim, len(input_sizes))
    index %= input_sizes[dim]
    config = [(0, 0, 0)] * len(input_sizes)
    config[dim] = (index, input_sizes[dim] - index - 1, 0)
    return lax.pad(jnp.expand_dims(grad_output, dim), _zero(grad_output), config)


@rule(aten.diagonal_backward.default)
def diagonal_backward(
    grad_output: Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Array:
    """The gradient of ``diagonal``: zeros off the diagonal."""
    zeros = jnp.zeros(tuple(input_sizes), grad_output.dtype)
    return _put(aten.diagonal.default)(zeros, grad_output, offset, dim1, dim2)


@rule(aten.unfold_backward.default)
def unfold_backward(
    grad_in: Array, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Array:
    """The gradient of ``unfold``: every window added back where it was read."""
    if not input_sizes:
        return jnp.sum(grad_in)
    dim = wrap_dim(dim, len(input_sizes))
    windows = jnp.moveaxis(grad_in, dim, -2)
    length, count = input_sizes[dim], windows.shape[-2]
    shape = (*windows.shape[:-2], length)
    if 0 < size <= MAX_UNROLLED_WINDOW:
        span = (count - 1) * step + 1
        # One interior-padded slice per position inside the window fuses into a single loop.
        total = jnp.zeros(shape, grad_in.dtype)
        for k in range(size):
            config = [(0, 0, 0)] * (len(shape) - 1) + [(k, length - k - span, step - 1)]
            total = total + lax.pad(windows[..., k], _zero(grad_in), config)
    else:
        positions = window_positions(count, size, step)
        total = jnp.zeros(shape, grad_in.dtype).at[..., positions].add(windows)
    return jnp.moveaxis(total, -1, dim)
