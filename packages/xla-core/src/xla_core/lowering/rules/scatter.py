"""``gather`` and the ``scatter`` operators: one index per element, along one dimension.

Indices out of range follow XLA: a read is clamped and a write dropped, where PyTorch raises.
Writing one entry per line (one-hot vectors, the gradient of a picked class) is a comparison with
the positions along that dimension, which XLA fuses, instead of a scatter, which it does not.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import Scalar, convert, is_float, scalar
from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.indexing import along
from xla_core.lowering.rules.views import wrap_dim
from xla_core.operators.lowering_registry import aten, rule

# Beyond this length of the dimension a comparison with every position costs more than a scatter.
_MAX_COMPARED_LENGTH = 4096


@rule(aten.gather.default)
def gather(self: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    """Elements along ``dim``; ``index`` may be smaller than ``self`` elsewhere."""
    if self.ndim == 0 or index.ndim == 0:
        flat = self.reshape(-1)
        return flat[index.reshape(-1)].reshape(index.shape)
    dim = wrap_dim(dim, self.ndim)
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    sizes = tuple(n if axis == dim else index.shape[axis] for axis, n in enumerate(self.shape))
    part = self if sizes == self.shape else lax.slice(self, (0,) * self.ndim, sizes)
    return jnp.take_along_axis(part, index, dim, mode="promise_in_bounds")


def _one_per_line(self: Array, dim: int, index: Array) -> bool:
    wanted = (*self.shape[:dim], 1, *self.shape[dim + 1 :])
    return index.shape == wanted and self.shape[dim] <= _MAX_COMPARED_LENGTH


def _hit(self: Array, dim: int, index: Array) -> Array:
    positions = lax.broadcasted_iota(index.dtype, self.shape, dim)
    wrapped = select(index < 0, index + self.shape[dim], index)
    return positions == wrapped


def _operands(self: Array, index: Array, source: Array) -> tuple[Array, Array, Array]:
    """Operands with at least one dimension; the source cut to the shape of ``index``."""
    if self.ndim == 0:
        self = self.reshape(1)
    if index.ndim == 0:
        index = index.reshape((1,) * self.ndim)
    if getattr(source, "ndim", 0) == 0:
        return self, index, jnp.broadcast_to(scalar(source, self.dtype), index.shape)
    part = lax.slice(source, (0,) * source.ndim, index.shape)
    return self, index, convert(part, self.dtype)


# Sums of booleans are disjunctions, products conjunctions.
_OF_BOOLEANS = {"add": "max", "multiply": "min"}


def _scatter(self: Array, dim: int, index: Array, source: Array, method: str) -> Array:
    whole, index, values = _operands(self, index, source)
    dim = wrap_dim(dim, whole.ndim)
    if index.size == 0:
        return self
    if method in ("set", "add") and _one_per_line(whole, dim, index):
        hit = _hit(whole, dim, index)
        written = select(hit, values, whole if method == "set" else 0)
        out = written if method == "set" else whole + written
    else:
        place = whole.at[along(index, dim)]
        if whole.dtype == np.bool_:
            method = _OF_BOOLEANS.get(method, method)
        out = getattr(place, method)(values)
    return out.reshape(self.shape)


@rule(aten.scatter.src, aten.scatter.value, lift=("value",))
def scatter(
    self: Array, dim: int, index: Array, src: Array | None = None, value: Scalar | None = None
) -> Array:
    """``self`` with ``src``, a tensor or one value, written at the indices along ``dim``."""
    return _scatter(self, dim, index, value if src is None else src, "set")


_BINARY = {"add": "add", "multiply": "multiply"}


@rule(aten.scatter.reduce, aten.scatter.value_reduce, lift=("value",))
def scatter_binary(
    self: Array,
    dim: int,
    index: Array,
    src: Array | None = None,
    value: Scalar | None = None,
    *,
    reduce: str,
) -> Array:
    """``self`` with ``src`` added or multiplied in at the indices along ``dim``."""
    return _scatter(self, dim, index, value if src is None else src, _BINARY[reduce])


@rule(aten.scatter_add.default)
def scatter_add(self: Array, dim: int, index: Array, src: Array) -> Array:
    """``self`` plus ``src`` at the indices along ``dim``; repeats add up."""
    return _scatter(self, dim, index, src, "add")


_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}
_BOOL_METHODS = {**_METHODS, "sum": _OF_BOOLEANS["add"], "prod": _OF_BOOLEANS["multiply"]}


def _neutral(reduce: str, dtype: np.dtype) -> object:
    """What a place that does not count itself starts from."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    low = reduce == "amax"
    if is_float(dtype):
        return -np.inf if low else np.inf
    if dtype == np.bool_:
        return not low
    return np.iinfo(dtype).min if low else np.iinfo(dtype).max


def reduce_at(
    whole: Array, key: tuple[Array | slice, ...], values: Array, reduce: str, include_self: bool
) -> Array:
    """``whole`` reduced with ``values`` at the places of ``key``; others keep their value."""
    start = whole
    if not include_self:
        touched = jnp.zeros(whole.shape, bool).at[key].set(True)
        start = select(touched, jnp.asarray(_neutral(reduce, whole.dtype), whole.dtype), whole)
    methods = _BOOL_METHODS if whole.dtype == np.bool_ else _METHODS
    total = getattr(start.at[key], methods[reduce])(values)
    if reduce != "mean":
        return total
    counts = jnp.full(whole.shape, int(include_self), np.int32).at[key].add(1)
    counts = jnp.maximum(counts, 1).astype(whole.dtype)
    return total / counts if is_float(whole.dtype) else jnp.floor_divide(total, counts)


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    self: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """Sum, product, mean, maximum or minimum of what is written to each place."""
    whole, index, values = _operands(self, index, src)
    if index.size == 0:
        return self
    key = along(index, wrap_dim(dim, whole.ndim))
    return reduce_at(whole, key, values, reduce, include_self).reshape(self.shape)


@rule(aten.index_reduce.default)
def index_reduce(
    self: Array,
    dim: int,
    index: Array,
    source: Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> Array:
    """The same for whole entries of one dimension."""
    whole = self.reshape(1) if self.ndim == 0 else self
    dim = wrap_dim(dim, whole.ndim)
    index = index.reshape(-1)
    shape = (*whole.shape[:dim], index.shape[0], *whole.shape[dim + 1 :])
    values = convert(source, self.dtype).reshape(shape)
    key = (*(slice(None),) * dim, index)
    return reduce_at(whole, key, values, reduce, include_self).reshape(self.shape)
