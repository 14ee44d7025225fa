"""Reading and writing by index tensors.

A negative index counts from the end, as in PyTorch. Indices out of range follow XLA: a read is
clamped and a write dropped, where PyTorch on the CPU raises. Boolean masks, whose result's shape
depends on their values, never get here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.lowering.rules.common import Scalar, convert, is_float, output_shape, scalar
from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.views import wrap_dim
from xla_core.operators.inlining import loops
from xla_core.operators.lowering_registry import RuleContext, aten, rule

_Indices = Sequence[Array | None]

# Boundaries up to which comparing with all of them beats a binary search's loop of gathers.
_MAX_COMPARED_BOUNDARIES = 256


def _key(indices: _Indices) -> tuple[object, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _axis_key(dim: int, index: Array) -> tuple[object, ...]:
    return (*(slice(None),) * dim, index)


def _readable(self: Array, key: tuple[Array | slice, ...]) -> Array:
    """``self`` with an element in every indexed dimension: XLA's gather insists on one.

    PyTorch raises where an index meets an empty dimension, once it knows that there is an index.
    """
    if self.size:
        return self
    whole = [isinstance(k, slice) for k in key] + [True] * (self.ndim - len(key))
    grown = [(0, int(not w and n == 0)) for w, n in zip(whole, self.shape, strict=True)]
    return jnp.pad(self, grown)


def _read(self: Array, key: tuple[Array | slice, ...]) -> Array:
    return _readable(self, key).at[key].get(mode="promise_in_bounds")


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: Array, indices: _Indices) -> Array:
    """Advanced indexing: integer tensors broadcast together, None keeps a dimension whole."""
    return _read(self, _key(indices))


@rule(
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl.default,
)
def index_put(
    self: Array,
    indices: _Indices,
    values: Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Array:
    """``self`` with ``values`` written, or added, at the indexed places."""
    key = _key(indices)
    values = convert(values, self.dtype)
    if not accumulate:
        return self.at[key].set(values)
    if self.dtype == np.bool_:
        return self.at[key].max(values)
    return self.at[key].add(values)


def _clamped(self: Array, indices: _Indices) -> list[Array | None]:
    sizes = [self.shape[d] for d in range(len(indices))]
    return [
        None if i is None else jnp.clip(i, -n, n - 1) for i, n in zip(indices, sizes, strict=True)
    ]


@rule(aten._unsafe_masked_index.default, lift=("fill",))
def unsafe_masked_index(self: Array, mask: Array, indices: _Indices, fill: Scalar) -> Array:
    """``self`` at the indices where ``mask`` holds, ``fill`` elsewhere."""
    values = _read(self, _key(_clamped(self, indices)))
    return select(mask, values, scalar(fill, self.dtype))


@rule(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(
    self: Array, mask: Array, indices: _Indices, values: Array
) -> Array:
    """``self`` plus ``values`` at the indices where ``mask`` holds."""
    return index_put(self, _clamped(self, indices), select(mask, values, 0), True)


@rule(aten.index_select.default)
def index_select(self: Array, dim: int, index: Array) -> Array:
    """Entries of one dimension; a 0-d tensor has the single entry 0."""
    if self.ndim == 0:
        return self
    # index_select refuses negative indices, so there is nothing to wrap.
    key = _axis_key(wrap_dim(dim, self.ndim), index.reshape(-1))
    return _readable(self, key).at[key].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _lined_up(self: Array, dim: int, *others: Array) -> tuple[Array, int, list[Array]]:
    """Operands of an index operator along ``dim`` with every 0-d one as one element."""
    lifted = [x.reshape(-1) if x.ndim == 0 else x for x in (self, *others)]
    return lifted[0], wrap_dim(dim, lifted[0].ndim), lifted[1:]


def _as_source(source: Array, self: Array, dim: int, index: Array) -> Array:
    shape = (*self.shape[:dim], index.shape[0], *self.shape[dim + 1 :])
    return convert(source, self.dtype).reshape(shape)


@rule(aten.index_add.default, lift=("alpha",))
def index_add(self: Array, dim: int, index: Array, source: Array, *, alpha: Scalar = 1) -> Array:
    """``self`` plus ``alpha * source`` at entries of one dimension; repeats add up."""
    whole, dim, (index,) = _lined_up(self, dim, index)
    source = _as_source(source, whole, dim, index)
    place = whole.at[_axis_key(dim, index)]
    if self.dtype == np.bool_:
        return place.max(source & scalar(alpha, np.dtype(np.bool_))).reshape(self.shape)
    return place.add(source * scalar(alpha, self.dtype)).reshape(self.shape)


@rule(aten.index_copy.default)
def index_copy(self: Array, dim: int, index: Array, source: Array) -> Array:
    """``self`` with entries of one dimension replaced by those of ``source``."""
    whole, dim, (index,) = _lined_up(self, dim, index)
    source = _as_source(source, whole, dim, index)
    return whole.at[_axis_key(dim, index)].set(source).reshape(self.shape)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, lift=("value",))
def index_fill(self: Array, dim: int, index: Array, value: Scalar) -> Array:
    """``self`` with entries of one dimension set to one value."""
    whole, dim, (index,) = _lined_up(self, dim, index)
    filled = whole.at[_axis_key(dim, index)].set(scalar(value, self.dtype))
    return filled.reshape(self.shape)


@rule(aten.take.default)
def take(self: Array, index: Array) -> Array:
    """Elements of the flattened tensor."""
    return _read(self.reshape(-1), (index,))


@rule(aten.put.default)
def put(self: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """``self`` with elements of its flattened form replaced, or added to."""
    place = self.reshape(-1).at[index.reshape(-1)]
    source = source.reshape(-1)
    if not accumulate:
        return place.set(source).reshape(self.shape)
    total = place.max(source) if self.dtype == np.bool_ else place.add(source)
    return total.reshape(self.shape)


@rule(aten.masked_scatter.default)
def masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """``self`` with the elements under ``mask`` replaced by those of ``source`` in order."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    flags = jnp.broadcast_to(mask, shape)
    if source.size == 0:
        return jnp.broadcast_to(self, shape)
    order = _mask_order(flags)
    values = source.reshape(-1).at[order].get(mode="clip", wrap_negative_indices=False)
    return select(flags, values, self)


def _mask_order(mask: Array) -> Array:
    """For each element under the mask, how many such elements come before it."""
    return jnp.cumsum(mask.reshape(-1), dtype=np.int32).reshape(mask.shape) - 1


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """The gradients under ``mask``, in order, as a tensor of ``sizes`` filled up with zeros."""
    flags = jnp.broadcast_to(mask, grad_output.shape)
    flat = jnp.zeros(math.prod(sizes), grad_output.dtype)
    place = select(flags, _mask_order(flags), np.iinfo(np.int32).max)
    return flat.at[place].set(grad_output, mode="drop").reshape(tuple(sizes))


def _search(boundaries: Array, values: Array, right: bool) -> Array:
    """Positions in the last dimension of ``boundaries``; ``values`` has its batch dimensions."""
    if boundaries.ndim == 1 and not is_symbolic(boundaries.shape[0]):
        method = "compare_all" if boundaries.shape[0] <= _MAX_COMPARED_BOUNDARIES else "scan"
        side = "right" if right else "left"
        with loops():
            return jnp.searchsorted(boundaries, values, side=side, method=method)
    grid = boundaries if boundaries.ndim == 1 else boundaries[..., None, :]
    wanted = values[..., None]
    return jnp.sum(grid <= wanted if right else grid < wanted, -1, dtype=np.int64)


@rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sorted_sequence: Array,
    self: Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """Where ``self`` would be inserted; ``side`` and ``right`` say before or after equals."""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    values = jnp.asarray(self)
    if not hasattr(self, "dtype"):
        whole = isinstance(self, int) or is_float(sorted_sequence.dtype)
        values = values.astype(sorted_sequence.dtype if whole else np.float32)
    return _search(sorted_sequence, values, right or side == "right")


@rule(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    self: Array, boundaries: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    """The bucket of each value between ``boundaries``."""
    return searchsorted(boundaries, self, right=right)


@rule(
    aten.isin.Tensor_Tensor,
    aten.isin.Tensor_Scalar,
    aten.isin.Scalar_Tensor,
    lift=("element", "test_element"),
)
def isin(
    elements: Array, test_elements: Array, *, assume_unique: bool = False, invert: bool = False
) -> Array:
    """Whether each element is among ``test_elements`` (or is not, with ``invert``)."""
    grid = jnp.asarray(elements)[..., None] == jnp.asarray(test_elements).reshape(-1)
    contained = jnp.any(grid, -1)
    return ~contained if invert else contained


@rule(aten.repeat_interleave.Tensor, context=True)
def repeat_interleave(
    context: RuleContext, repeats: Array, *, output_size: int | None = None
) -> Array:
    """Each position as often as ``repeats`` says; the result's length must have been given."""
    positions = jnp.arange(repeats.shape[0], dtype=repeats.dtype)
    return jnp.repeat(positions, repeats, total_repeat_length=output_shape(context)[0])


def along(index: Array, dim: int) -> tuple[Array, ...]:
    """One index array per dimension: ``index`` along ``dim``, plain positions along the others."""
    parts = []
    for axis, size in enumerate(index.shape):
        shape = [size if a == axis else 1 for a in range(index.ndim)]
        parts.append(index if axis == dim else lax.broadcasted_iota(index.dtype, shape, axis))
    return tuple(parts)
