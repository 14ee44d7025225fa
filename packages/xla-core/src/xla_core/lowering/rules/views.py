"""View operators: how to read a view from its base, and how a write into it reaches the base.

Writes use static positions only: whole values are reshaped or transposed back, contiguous ranges
become ``dynamic_update_slice`` and strided ones a padded value chosen by a padded mask, both of
which XLA fuses; only ``as_strided`` and overlapping ``unfold`` need a scatter.
A base always counts as contiguous, which is what ``as_strided`` measures its strides against.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch._ops import OpOverload

from xla_core.lowering.rules.common import count_as, opmath
from xla_core.operators.lowering_registry import aten, multi_view_rule, view_rule
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.operands import Operands

# Up to this many strided slices are stacked for an overlapping window before a gather is smaller.
MAX_UNROLLED_WINDOW = 16

# The end of a slice that has none, where PyTorch writes it as a number.
_LARGEST = 2**63 - 1


def wrap_dim(dim: int, rank: int) -> int:
    """``dim`` counted from the front; a 0-d tensor accepts -1 and 0 as PyTorch does."""
    return dim % max(rank, 1)


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """Start, end and length of ``slice`` over a dimension of ``size``, clamped as PyTorch does."""
    low = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    high = (
        size
        if end is None or end == _LARGEST
        else min(max(end + size if end < 0 else end, low), size)
    )
    high = max(high, low)
    return low, high, -(-(high - low) // step)


def _identity(base: Array) -> Array:
    return base


def _put_whole(base: Array, value: Array) -> Array:
    return value


def _reshape(base: Array, size: Sequence[int], *_: object) -> Array:
    return jnp.reshape(base, tuple(size))


def _unreshape(base: Array, value: Array, *_: object) -> Array:
    return jnp.reshape(value, base.shape)


def _t(base: Array) -> Array:
    return base.T


def _put_t(base: Array, value: Array) -> Array:
    return value.T


def _transpose(base: Array, dim0: int, dim1: int) -> Array:
    return base if base.ndim == 0 else jnp.swapaxes(base, dim0, dim1)


def _put_transpose(base: Array, value: Array, dim0: int, dim1: int) -> Array:
    return _transpose(value, dim0, dim1)


def _permute(base: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(base, tuple(wrap_dim(d, base.ndim) for d in dims))


def _put_permute(base: Array, value: Array, dims: Sequence[int]) -> Array:
    order = [wrap_dim(d, base.ndim) for d in dims]
    return jnp.transpose(value, tuple(np.argsort(order)) if order else ())


def _select(base: Array, dim: int, index: int) -> Array:
    dim = wrap_dim(dim, base.ndim)
    return lax.index_in_dim(base, index, dim, keepdims=False)


def _put_select(base: Array, value: Array, dim: int, index: int) -> Array:
    dim = wrap_dim(dim, base.ndim)
    return _put_range(base, jnp.expand_dims(value, dim), dim, index % base.shape[dim])


def _slice(
    base: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    dim = wrap_dim(dim, base.ndim)
    low, high, length = slice_bounds(base.shape[dim], start, end, step)
    if length == base.shape[dim]:
        return base
    return lax.slice_in_dim(base, low, high, step, dim)


def _put_slice(
    base: Array,
    value: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    dim = wrap_dim(dim, base.ndim)
    size = base.shape[dim]
    low, _, length = slice_bounds(size, start, end, step)
    if length == 0:
        return base
    if length == size:
        return value
    if step == 1 or length == 1:
        return _put_range(base, value, dim, low)
    config = [(0, 0, 0)] * base.ndim
    config[dim] = (low, size - low - (length - 1) * step - 1, step - 1)
    written = lax.pad(jnp.ones(value.shape, bool), np.False_, config)
    return lax.select(written, lax.pad(value, _zero(value), config), base)


def _put_range(base: Array, value: Array, dim: int, low: int) -> Array:
    if value.shape == base.shape:
        return value
    starts: list[object] = [np.int32(0)] * base.ndim
    starts[dim] = count_as(low, np.dtype(np.int32))
    return lax.dynamic_update_slice(base, value, starts)


def _zero(like: Array) -> np.ndarray:
    return np.zeros((), like.dtype)


def _unsqueeze(base: Array, dim: int) -> Array:
    return jnp.expand_dims(base, dim % (base.ndim + 1))


def _squeeze(base: Array, dim: int | Sequence[int] | None = None) -> Array:
    dims = range(base.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {wrap_dim(d, base.ndim) for d in dims}
    return jnp.reshape(base, [s for d, s in enumerate(base.shape) if s != 1 or d not in gone])


def _expand(base: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    new = len(size) - base.ndim
    return jnp.broadcast_to(
        base, tuple(base.shape[d - new] if s == -1 else s for d, s in enumerate(size))
    )


def _diagonal_span(rows: int, columns: int, offset: int) -> tuple[int, int, int]:
    """First row, first column and length of the diagonal."""
    row, column = max(-offset, 0), max(offset, 0)
    return row, column, max(min(rows - row, columns - column), 0)


def _diagonal(base: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    moved = jnp.moveaxis(base, (dim1, dim2), (-2, -1))
    *batch, rows, columns = moved.shape
    row, column, length = _diagonal_span(rows, columns, offset)
    if length == 0:
        return jnp.zeros((*batch, 0), base.dtype)
    # Neighbours on a diagonal are columns + 1 apart in the flat matrix: a strided slice, no gather.
    first = row * columns + column
    flat = jnp.reshape(moved, (*batch, rows * columns))
    last = first + (length - 1) * (columns + 1) + 1
    return lax.slice_in_dim(flat, first, last, columns + 1, len(batch))


def _put_diagonal(
    base: Array, value: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    moved = jnp.moveaxis(base, (dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    row, _, length = _diagonal_span(rows, columns, offset)
    if length == 0:
        return base
    config = [(0, 0, 0)] * (value.ndim - 1) + [(row, rows - row - length, 0)]
    by_row = jnp.broadcast_to(lax.pad(value, _zero(value), config)[..., None], moved.shape)
    i = lax.broadcasted_iota(np.int32, moved.shape, moved.ndim - 2)
    j = lax.broadcasted_iota(np.int32, moved.shape, moved.ndim - 1)
    written = lax.select(lax.eq(j - i, jnp.full_like(i, offset)), by_row, moved)
    return jnp.moveaxis(written, (-2, -1), (dim1, dim2))


def _unfold(base: Array, dimension: int, size: int, step: int) -> Array:
    if base.ndim == 0:
        return jnp.broadcast_to(base, (size,))
    dim = wrap_dim(dimension, base.ndim)
    moved = jnp.moveaxis(base, dim, -1)
    count = (moved.shape[-1] - size) // step + 1
    axis = moved.ndim - 1
    if step == size:
        windows = moved[..., : count * size].reshape(*moved.shape[:-1], count, size)
    elif 0 < size <= MAX_UNROLLED_WINDOW:
        span = (count - 1) * step + 1
        slices = [lax.slice_in_dim(moved, k, k + span, step, axis) for k in range(size)]
        windows = jnp.stack(slices, -1)
    else:
        windows = moved[..., window_positions(count, size, step)]
    return jnp.moveaxis(windows, -2, dim)


def window_positions(count: int, size: int, step: int) -> np.ndarray:
    """The places that ``count`` windows of ``size``, ``step`` apart, cover: ``[count, size]``."""
    return np.arange(count, dtype=np.int32)[:, None] * step + np.arange(size, dtype=np.int32)


def _put_unfold(base: Array, value: Array, dimension: int, size: int, step: int) -> Array:
    if base.ndim == 0:
        return jnp.reshape(value[-1], ()) if size else base
    dim = wrap_dim(dimension, base.ndim)
    moved = jnp.moveaxis(base, dim, -1)
    windows = jnp.moveaxis(value, dim, -2)
    positions = window_positions(windows.shape[-2], size, step)
    return jnp.moveaxis(moved.at[..., positions].set(windows), -1, dim)


def _as_strided_plan(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are those of a contiguous block."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _strided_positions(size: Sequence[int], stride: Sequence[int], offset: int) -> Array:
    positions = jnp.full(tuple(size), offset, np.int32)
    for axis, step in enumerate(stride):
        positions = positions + lax.broadcasted_iota(np.int32, tuple(size), axis) * np.int32(step)
    return positions


def _as_strided(
    base: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    offset = storage_offset or 0
    flat = jnp.reshape(base, (-1,))
    if math.prod(size) == 0:
        return jnp.zeros(tuple(size), base.dtype)
    if _as_strided_plan(size, stride):
        return flat[offset : offset + math.prod(size)].reshape(tuple(size))
    return flat[_strided_positions(size, stride, offset)]


def _put_as_strided(
    base: Array,
    value: Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    offset = storage_offset or 0
    flat = jnp.reshape(base, (-1,))
    if math.prod(size) == 0:
        return base
    if _as_strided_plan(size, stride):
        written = _put_range(flat, jnp.reshape(value, (-1,)), 0, offset)
    else:
        written = flat.at[_strided_positions(size, stride, offset)].set(value)
    return jnp.reshape(written, base.shape)


def bitcast(value: Array, wanted: np.dtype) -> Array:
    """The bits of ``value`` seen as ``wanted``; the last dimension scales with the item sizes."""
    if value.dtype == wanted:
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return bitcast(_merge_last(_view_as_real(value)), wanted)
    if value.dtype == np.bool_:
        return bitcast(value.astype(np.uint8), wanted)
    if wanted == np.bool_:
        return bitcast(value, np.dtype(np.uint8)) != 0
    if jnp.issubdtype(wanted, jnp.complexfloating):
        part = np.dtype(np.float32 if wanted == np.complex64 else np.float64)
        return _view_as_complex(_split_last(bitcast(value, part), 2))
    have, want = value.dtype.itemsize, wanted.itemsize
    if have < want:
        return lax.bitcast_convert_type(_split_last(value, want // have), wanted)
    out = lax.bitcast_convert_type(value, wanted)
    return out if have == want else _merge_last(out)


def _merge_last(value: Array) -> Array:
    if value.ndim == 1:  # a 0-d value became one number in several parts; PyTorch refuses this view
        return value
    return value.reshape(*value.shape[:-2], value.shape[-2] * value.shape[-1])


def _split_last(value: Array, parts: int) -> Array:
    return value.reshape(*value.shape[:-1], value.shape[-1] // parts, parts)


def _view_dtype(base: Array, dtype: torch.dtype) -> Array:
    return bitcast(base, numpy_dtype(dtype))


def _put_view_dtype(base: Array, value: Array, dtype: torch.dtype) -> Array:
    return bitcast(value, base.dtype)


def _view_as_real(base: Array) -> Array:
    return jnp.stack([jnp.real(base), jnp.imag(base)], -1)


def _view_as_complex(base: Array) -> Array:
    wide = opmath(base)
    return lax.complex(wide[..., 0], wide[..., 1])


def _put_real(base: Array, value: Array) -> Array:
    return lax.complex(opmath(value), jnp.imag(base)) if jnp.iscomplexobj(base) else value


def _put_imag(base: Array, value: Array) -> Array:
    return lax.complex(jnp.real(base), opmath(value))


view_rule(aten.alias.default, _identity, _put_whole)
view_rule(aten.detach.default, _identity, _put_whole)
view_rule(aten.lift_fresh.default, _identity, _put_whole)
view_rule(aten.view.default, _reshape, _unreshape)
view_rule(aten._reshape_alias.default, _reshape, _unreshape)
view_rule(aten.t.default, _t, _put_t)
view_rule(aten.transpose.int, _transpose, _put_transpose)
view_rule(aten.permute.default, _permute, _put_permute)
view_rule(aten.select.int, _select, _put_select)
view_rule(aten.slice.Tensor, _slice, _put_slice)
view_rule(aten.unsqueeze.default, _unsqueeze, _unreshape)
view_rule(aten.squeeze.default, _squeeze, _unreshape)
view_rule(aten.squeeze.dim, _squeeze, _unreshape)
view_rule(aten.squeeze.dims, _squeeze, _unreshape)
view_rule(aten.expand.default, _expand, None)
view_rule(aten.diagonal.default, _diagonal, _put_diagonal)
view_rule(aten.unfold.default, _unfold, _put_unfold, overlaps=True)
view_rule(aten.as_strided.default, _as_strided, _put_as_strided, overlaps=True)
view_rule(aten.view.dtype, _view_dtype, _put_view_dtype)
view_rule(aten.view_as_real.default, _view_as_real, lambda base, value: _view_as_complex(value))
view_rule(aten.view_as_complex.default, _view_as_complex, lambda base, value: _view_as_real(value))
view_rule(aten._conj.default, jnp.conj, lambda base, value: jnp.conj(value))
view_rule(aten._neg_view.default, jnp.negative, lambda base, value: -value)
view_rule(aten.real.default, jnp.real, _put_real)
view_rule(aten.imag.default, jnp.imag, _put_imag)


_Views = list[tuple[OpOverload, Operands]]


def _slices(dim: int, edges: Sequence[int]) -> _Views:
    return [(aten.slice.Tensor, (dim, low, high)) for low, high in itertools.pairwise(edges)]


def _expand_split(base: TensorMeta, split_size: int, dim: int = 0) -> _Views:
    size = base.shape[wrap_dim(dim, len(base.shape))]
    if size == 0:
        return _slices(dim, [0, 0])
    return _slices(dim, [*range(0, size, split_size), size])


def _expand_split_with_sizes(base: TensorMeta, split_sizes: Sequence[int], dim: int = 0) -> _Views:
    return _slices(dim, [0, *np.cumsum(split_sizes, dtype=int).tolist()])


def _expand_unbind(base: TensorMeta, dim: int = 0) -> _Views:
    size = base.shape[wrap_dim(dim, len(base.shape))]
    return [(aten.select.int, (dim, index)) for index in range(size)]


def _expand_chunk(base: TensorMeta, chunks: int, dim: int = 0) -> _Views:
    size = base.shape[wrap_dim(dim, len(base.shape))]
    if size == 0:  # PyTorch gives as many empty chunks as were asked for
        return _slices(dim, [0] * (chunks + 1))
    return _expand_split(base, -(-size // chunks), dim)


multi_view_rule(aten.split.Tensor, _expand_split)
multi_view_rule(aten.split_with_sizes.default, _expand_split_with_sizes)
multi_view_rule(aten.unbind.int, _expand_unbind)
multi_view_rule(aten.chunk.default, _expand_chunk)
