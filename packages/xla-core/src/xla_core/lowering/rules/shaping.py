"""Joining, repeating, rolling, flipping and padding; rearrangements of channels and patches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import Scalar, convert, output_dtype, scalar
from xla_core.lowering.rules.views import wrap_dim
from xla_core.operators.lowering_registry import RuleContext, aten, rule


@rule(aten.cat.default, context=True)
def cat(context: RuleContext, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Concatenation in the promoted dtype; old-style empty vectors count as absent."""
    dtype = output_dtype(context)
    parts = [convert(t, dtype) for t in tensors if t.shape != (0,)]
    if not parts:
        return jnp.zeros((0,), dtype)
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, wrap_dim(dim, parts[0].ndim))


@rule(aten.stack.default, context=True)
def stack(context: RuleContext, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Concatenation along a new dimension."""
    dtype = output_dtype(context)
    dim %= tensors[0].ndim + 1
    return lax.concatenate([jnp.expand_dims(convert(t, dtype), dim) for t in tensors], dim)


@rule(aten.roll.default)
def roll(self: Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Array:
    """Elements moved around the end; over the flattened tensor without ``dims``."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if self.size == 0 or self.ndim == 0:
        return self
    if not dims:
        return jnp.roll(self.reshape(-1), shifts[0]).reshape(self.shape)
    return jnp.roll(self, tuple(shifts), tuple(dims))


@rule(aten.flip.default)
def flip(self: Array, dims: Sequence[int]) -> Array:
    """Elements in reverse order along ``dims``."""
    return lax.rev(self, [wrap_dim(d, self.ndim) for d in dims]) if self.ndim else self


@rule(aten.rot90.default)
def rot90(self: Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> Array:
    """Quarter turns in a plane."""
    return jnp.rot90(self, k, (dims[0], dims[1]))


@rule(aten.repeat.default)
def repeat(self: Array, repeats: Sequence[int]) -> Array:
    """Copies side by side along each dimension; missing dimensions come first."""
    shape = (1,) * (len(repeats) - self.ndim) + self.shape
    # One broadcast and one reshape, both of which XLA fuses.
    paired = [n for size in shape for n in (1, size)]
    wide = [n for r, size in zip(repeats, shape, strict=True) for n in (r, size)]
    whole = jnp.broadcast_to(self.reshape(paired), wide)
    return whole.reshape([r * n for r, n in zip(repeats, shape, strict=True)])


@rule(aten.constant_pad_nd.default, lift=("value",))
def constant_pad_nd(self: Array, pad: Sequence[int], value: Scalar = 0) -> Array:
    """Padding of the last dimensions, last one first; a negative amount cuts."""
    config = [(0, 0, 0)] * self.ndim
    for place in range(len(pad) // 2):
        config[self.ndim - 1 - place] = (pad[2 * place], pad[2 * place + 1], 0)
    return lax.pad(self, scalar(value, self.dtype), config)


def _chunks(size: int, chunk: int) -> list[int]:
    return [min(chunk, size - low) for low in range(0, size, chunk)] if size else [0]


@rule(aten.unsafe_split_with_sizes.default, aten.split_with_sizes_copy.default)
def split_with_sizes(self: Array, split_sizes: Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    """Pieces of the given sizes."""
    edges = np.cumsum([0, *split_sizes]).tolist()
    dim = wrap_dim(dim, self.ndim)
    return tuple(
        lax.slice_in_dim(self, low, high, axis=dim) for low, high in itertools.pairwise(edges)
    )


@rule(aten.unsafe_split.Tensor, aten.split_copy.Tensor)
def split(self: Array, split_size: int, dim: int = 0) -> tuple[Array, ...]:
    """Pieces of one size, the last one smaller if need be."""
    return split_with_sizes(self, _chunks(self.shape[dim], split_size), dim)


@rule(aten.unbind_copy.int)
def unbind(self: Array, dim: int = 0) -> tuple[Array, ...]:
    """The entries of one dimension."""
    dim = wrap_dim(dim, self.ndim)
    return tuple(
        lax.index_in_dim(self, place, dim, keepdims=False) for place in range(self.shape[dim])
    )


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(self: Array, upscale_factor: int) -> Array:
    """Channels moved into ``upscale_factor`` times as many rows and columns."""
    r = upscale_factor
    *batch, channels, height, width = self.shape
    parts = self.reshape(*batch, channels // r**2, r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return parts.transpose(order).reshape(*batch, channels // r**2, height * r, width * r)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(self: Array, downscale_factor: int) -> Array:
    """The inverse of ``pixel_shuffle``."""
    r = downscale_factor
    *batch, channels, height, width = self.shape
    parts = self.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return parts.transpose(order).reshape(*batch, channels * r**2, height // r, width // r)


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(self: Array, groups: int) -> Array:
    """Channels of the groups interleaved."""
    batch, channels, *rest = self.shape
    parts = self.reshape(batch, groups, channels // groups, *rest)
    return jnp.swapaxes(parts, 1, 2).reshape(self.shape)


@rule(aten.block_diag.default, context=True)
def block_diag(context: RuleContext, tensors: Sequence[Array]) -> Array:
    """Matrices along the diagonal of one that is zero elsewhere."""
    dtype = output_dtype(context)
    blocks = [convert(jnp.atleast_2d(t), dtype) for t in tensors]
    total = sum(b.shape[1] for b in blocks)
    rows, left = [], 0
    for block in blocks:
        width = block.shape[1]
        rows.append(jnp.pad(block, ((0, 0), (left, total - left - width))))
        left += width
    return jnp.concatenate(rows, 0)


@rule(aten.diag_embed.default)
def diag_embed(self: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """The last dimension as a diagonal of new matrices that are zero elsewhere."""
    low, high = max(-offset, 0), max(offset, 0)
    size = self.shape[-1] + abs(offset)
    config = [(0, 0, 0)] * (self.ndim - 1) + [(low, size - low - self.shape[-1], 0)]
    by_row = lax.pad(self, np.zeros((), self.dtype), config)[..., None]
    shape = (*self.shape[:-1], size, size)
    row = lax.broadcasted_iota(np.int32, shape, len(shape) - 2)
    column = lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
    matrix = jnp.where(column - row == high - low, by_row, np.zeros((), self.dtype))
    return jnp.moveaxis(matrix, (-2, -1), (dim1, dim2))


@rule(aten.trace.default)
def trace(self: Array) -> Array:
    """Sum of the diagonal."""
    return jnp.sum(jnp.diagonal(self))


@rule(aten.linalg_cross.default)
def linalg_cross(self: Array, other: Array, *, dim: int = -1) -> Array:
    """Cross product of vectors of three along ``dim``."""
    left, right = jnp.broadcast_arrays(self, other)
    ahead = jnp.roll(left, -1, dim) * jnp.roll(right, -2, dim)
    return ahead - jnp.roll(left, -2, dim) * jnp.roll(right, -1, dim)


def _patch_count(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@rule(aten.im2col.default)
def im2col(
    self: Array,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """Sliding blocks as columns (``torch.nn.Unfold``), over ``[(N,) C, H, W]``."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = kernel_size, dilation, padding, stride
    height = _patch_count(self.shape[-2], kh, dh, ph, sh)
    width = _patch_count(self.shape[-1], kw, dw, pw, sw)
    padded = jnp.pad(self, [(0, 0)] * (self.ndim - 2) + [(ph, ph), (pw, pw)])
    blocks = [
        padded[..., i * dh : i * dh + (height - 1) * sh + 1 : sh,
               j * dw : j * dw + (width - 1) * sw + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]  # fmt: skip
    *batch, channels = self.shape[:-2]
    return jnp.stack(blocks, -3).reshape(*batch, channels * kh * kw, height * width)


@rule(aten.col2im.default)
def col2im(
    self: Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """Columns added back where ``im2col`` reads them (``torch.nn.Fold``)."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = kernel_size, dilation, padding, stride
    rows, columns = output_size
    height = _patch_count(rows, kh, dh, ph, sh)
    width = _patch_count(columns, kw, dw, pw, sw)
    *batch, depth = self.shape[:-1]
    blocks = self.reshape(*batch, depth // (kh * kw), kh, kw, height, width)
    lead = [(0, 0, 0)] * (len(batch) + 1)
    total = jnp.zeros((*batch, depth // (kh * kw), rows, columns), self.dtype)
    for i in range(kh):
        for j in range(kw):
            # Interior padding puts the stride back; the negative part cuts the padding off.
            top, left = i * dh - ph, j * dw - pw
            bottom = rows - top - (height - 1) * sh - 1
            right = columns - left - (width - 1) * sw - 1
            config = [*lead, (top, bottom, sh - 1), (left, right, sw - 1)]
            total = total + lax.pad(blocks[..., i, j, :, :], np.zeros((), self.dtype), config)
    return total
