"""Running sums, products and extremes; softmax; order statistics."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.lowering.rules.common import (
    convert,
    is_float,
    is_nan,
    opmath,
    output_dtype,
    present,
    where,
)
from xla_core.lowering.rules.reductions import finite_maximum, sum_over
from xla_core.lowering.rules.ternary import complex_log_add_exp
from xla_core.operators.inlining import loops
from xla_core.operators.lowering_registry import RuleContext, rule


def _at_least_1d(array: Array) -> Array:
    return array.reshape(1) if array.ndim == 0 else array


def _scan(operation: Callable[..., Array], self: Array, dim: int) -> Array:
    array = _at_least_1d(self)
    return operation(array, axis=dim % array.ndim).reshape(self.shape)


@rule(*present("cumsum"), context=True)
def cumsum(context: RuleContext, self: Array, dim: int, *, dtype: object = None) -> Array:
    """The running sum along ``dim``."""
    return _scan(lax.cumsum, opmath(convert(self, output_dtype(context))), dim)


@rule(*present("cumprod"), context=True)
def cumprod(context: RuleContext, self: Array, dim: int, *, dtype: object = None) -> Array:
    """The running product along ``dim``."""
    return _scan(lax.cumprod, opmath(convert(self, output_dtype(context))), dim)


@rule(*present("logcumsumexp", "_logcumsumexp"))
def logcumsumexp(self: Array, dim: int) -> Array:
    """The logarithm of the running sum of exponentials along ``dim``."""
    operation = _complex_cumlogsumexp if np.iscomplexobj(self) else running_log_sum
    return _scan(operation, opmath(self), dim)


def running_log_sum(array: Array, axis: int) -> Array:
    """``log(cumsum(exp(array), axis))`` of floating-point numbers, rounded once at their magnitude.

    A logarithm of each partial sum, as ``lax.cumlogsumexp`` has, is rounded at each: what is as large as 1e4 loses
    more than PyTorch's CPU does, and the gradient is an exponential of it. Partial sums are pairs here: the largest
    number, and by how much its multiple is more than 1.
    """
    if is_symbolic(array.shape[axis]):
        return lax.cumlogsumexp(array, axis=axis)  # whoever fills in the length calls this again
    largest, excess = lax.associative_scan(
        _joined_log_sums, (array, jnp.zeros_like(array)), axis=axis
    )
    return largest + jnp.log1p(excess)


def _joined_log_sums(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sum of two partial sums: the smaller one is scaled to the larger one's largest number."""
    equal, first = left[0] == right[0], left[0] >= right[0]
    scale = where(equal, 1.0, jnp.exp(-jnp.abs(left[0] - right[0])))  # infinities may be equal
    more, less = where(first, left[1], right[1]), where(first, right[1], left[1])
    return jnp.maximum(left[0], right[0]), more + (1 + less) * scale


def _complex_cumlogsumexp(array: Array, axis: int) -> Array:
    """The running sum from first to last: the angles, whose sums PyTorch does not wrap, depend on the order."""

    def step(total: Array, value: Array) -> tuple[Array, Array]:
        total = complex_log_add_exp(value, total)
        return total, total

    rows = jnp.moveaxis(array, axis, 0)
    nothing = jnp.full(rows.shape[1:], -np.inf, array.dtype)
    with loops():
        results = lax.scan(step, nothing, rows)[1]
    return jnp.moveaxis(results, 0, axis)


def _running_extreme(operation: Callable[..., Array], self: Array, dim: int) -> tuple[Array, Array]:
    """The running extreme and the latest index where it was reached; NaN stays once seen."""
    array = _at_least_1d(self)
    axis = dim % array.ndim
    ordered = array.astype(np.uint8) if array.dtype == np.bool_ else array
    values = operation(ordered, axis=axis)
    reached = ordered == values
    if is_float(array.dtype):
        reached |= is_nan(ordered)
    position = lax.broadcasted_iota(np.int64, array.shape, axis)
    indices = lax.cummax(where(reached, position, 0), axis=axis)
    return values.astype(self.dtype).reshape(self.shape), indices.reshape(self.shape)


@rule(*present("cummax"))
def cummax(self: Array, dim: int) -> tuple[Array, Array]:
    """The running maximum along ``dim`` and its int64 indices."""
    return _running_extreme(lax.cummax, self, dim)


@rule(*present("cummin"))
def cummin(self: Array, dim: int) -> tuple[Array, Array]:
    """The running minimum along ``dim`` and its int64 indices."""
    return _running_extreme(lax.cummin, self, dim)


def softmax(value: Array, dim: int) -> Array:
    """The softmax along ``dim``; NaN where every element is minus infinity."""
    array = _at_least_1d(value)
    axis = (dim % array.ndim,)
    # The true maximum, not a finite one: a row of infinities is NaN in PyTorch.
    exponential = lax.exp(array - jnp.max(array, axis=axis, keepdims=True, initial=-np.inf))
    return (exponential / sum_over(exponential, axis, True)).reshape(value.shape)


def log_softmax(value: Array, dim: int) -> Array:
    """The logarithm of the softmax along ``dim``."""
    array = _at_least_1d(value)
    axis = (dim % array.ndim,)
    shifted = array - jnp.max(array, axis=axis, keepdims=True, initial=-np.inf)
    return (shifted - lax.log(sum_over(lax.exp(shifted), axis, True))).reshape(value.shape)


def safe_softmax_of(value: Array, dim: int) -> Array:
    """The softmax along ``dim``; 0 where every element is minus infinity."""
    array = _at_least_1d(value)
    axis = (dim % array.ndim,)
    exponential = lax.exp(array - finite_maximum(array, axis))
    total = sum_over(exponential, axis, True)
    return (exponential / where(total == 0, 1, total)).reshape(value.shape)


@rule(*present("_softmax"))
def softmax_rule(self: Array, dim: int, half_to_float: bool) -> Array:
    """The softmax, in float32 inside for bfloat16 and float16."""
    return softmax(opmath(self), dim)


@rule(*present("_log_softmax"))
def log_softmax_rule(self: Array, dim: int, half_to_float: bool) -> Array:
    """The logarithm of the softmax, in float32 inside for bfloat16 and float16."""
    return log_softmax(opmath(self), dim)


@rule(*present("_safe_softmax"), context=True)
def safe_softmax(context: RuleContext, self: Array, dim: int, dtype: object = None) -> Array:
    """The softmax with rows of minus infinity giving 0."""
    return safe_softmax_of(opmath(convert(self, output_dtype(context))), dim)


@rule(*present("_softmax_backward_data"))
def softmax_backward(grad_output: Array, output: Array, dim: int, input_dtype: object) -> Array:
    """The gradient of the softmax from its output."""
    product = opmath(grad_output) * opmath(output)
    if product.ndim == 0:
        return product - opmath(output) * product
    return product - opmath(output) * sum_over(product, (dim % product.ndim,), True)


@rule(*present("_log_softmax_backward_data"))
def log_softmax_backward(grad_output: Array, output: Array, dim: int, input_dtype: object) -> Array:
    """The gradient of the logarithm of the softmax from its output."""
    gradient = opmath(grad_output)
    total = gradient if gradient.ndim == 0 else sum_over(gradient, (dim % gradient.ndim,), True)
    return gradient - lax.exp(opmath(output)) * total


def _sorted_with_index(array: Array, axis: int) -> tuple[Array, Array]:
    """``array`` sorted along ``axis``, NaN last, and where each element came from."""
    position = lax.broadcasted_iota(np.int64, array.shape, axis)
    return tuple(lax.sort((array, position), dimension=axis, is_stable=True, num_keys=1))


def _take(array: Array, index: int, axis: int, keepdim: bool) -> Array:
    chosen = lax.slice_in_dim(array, index, index + 1, axis=axis)
    return chosen if keepdim else lax.squeeze(chosen, (axis,))


def _scalar_with_index(self: Array) -> tuple[Array, Array]:
    return self, jnp.zeros((), np.int64)


@rule(*present("kthvalue"))
def kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The ``k``-th smallest element (from 1) along ``dim`` and its int64 index."""
    if self.ndim == 0:
        return _scalar_with_index(self)
    axis = dim % self.ndim
    values, indices = _sorted_with_index(self, axis)
    return _take(values, k - 1, axis, keepdim), _take(indices, k - 1, axis, keepdim)


@rule(*present("median.dim"))
def median_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower median along ``dim`` and its int64 index; the first NaN if there is one."""
    if self.ndim == 0:
        return _scalar_with_index(self)
    axis = dim % self.ndim
    value, index = kthvalue(self, (self.shape[axis] + 1) // 2, dim, keepdim)
    if not is_float(self.dtype):
        return value, index
    missing = is_nan(self)
    first = lax.argmax(missing.astype(np.uint8), axis, np.int64)
    some = jnp.any(missing, axis=axis, keepdims=keepdim)
    first = jnp.expand_dims(first, axis) if keepdim else first
    return where(some, np.nan, value), where(some, first, index)


@rule(*present("median"))
def median(self: Array) -> Array:
    """The lower median of all elements; NaN if one is NaN."""
    return median_dim(self.reshape(-1), 0)[0]


@rule(*present("nanmedian.dim"))
def nanmedian_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower median of what is not NaN along ``dim``, and its int64 index."""
    if self.ndim == 0:
        return _scalar_with_index(self)
    if not is_float(self.dtype):
        return median_dim(self, dim, keepdim)
    axis = dim % self.ndim
    values, indices = _sorted_with_index(self, axis)
    known = sum_over((~is_nan(self)).astype(np.int64), (axis,), True)
    chosen = jnp.maximum(known - 1, 0) // 2
    picked = [jnp.take_along_axis(array, chosen, axis=axis) for array in (values, indices)]
    return tuple(array if keepdim else lax.squeeze(array, (axis,)) for array in picked)


@rule(*present("nanmedian"))
def nanmedian(self: Array) -> Array:
    """The lower median of all elements that are not NaN."""
    return nanmedian_dim(self.reshape(-1), 0)[0]


@rule(*present("mode"))
def mode(self: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The most frequent element along ``dim``, the smallest of several, and its last index."""
    if self.ndim == 0:
        return _scalar_with_index(self)
    axis = dim % self.ndim
    values, indices = _sorted_with_index(self, axis)
    position = lax.broadcasted_iota(np.int64, self.shape, axis)
    same = jnp.roll(values, 1, axis) == values
    run_start = lax.cummax(where(same & (position > 0), 0, position), axis=axis)
    longest = jnp.expand_dims(lax.argmax(position - run_start, axis, np.int64), axis)
    picked = [jnp.take_along_axis(array, longest, axis=axis) for array in (values, indices)]
    return tuple(array if keepdim else lax.squeeze(array, (axis,)) for array in picked)
