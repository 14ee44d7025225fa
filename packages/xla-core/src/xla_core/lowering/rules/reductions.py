"""Reductions over dimensions: sums, extremes, moments, norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.jax_bridge.traced_values import Size, TracedValue
from xla_core.lowering.rules import complex_functions
from xla_core.lowering.rules.common import (
    Scalar,
    convert,
    count_as,
    is_complex,
    is_float,
    is_nan,
    normalize_dims,
    opmath,
    output_dtype,
    output_shape,
    present,
    where,
)
from xla_core.lowering.rules.comparison import truth
from xla_core.operators.lowering_registry import RuleContext, rule

Dims = int | Sequence[int] | None


def _counted(array: Array, dims: tuple[int, ...]) -> int:
    count = 1
    for dim in dims:
        count *= array.shape[dim]
    return count


def sum_over(array: Array, dims: tuple[int, ...], keepdim: bool = False) -> Array:
    """The sum over ``dims``, in the dtype of ``array``."""
    return jnp.sum(array, axis=dims, keepdims=keepdim, dtype=array.dtype)


@rule(*present("sum", "sum.dim_IntList"), context=True)
def sum_rule(
    context: RuleContext,
    self: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """The sum; bool and integers give int64, bfloat16 and float16 accumulate in float32."""
    value = opmath(convert(self, output_dtype(context)))
    return sum_over(value, normalize_dims(dim, self.ndim), keepdim)


@rule(*present("nansum"), context=True)
def nansum(
    context: RuleContext,
    self: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """The sum with NaN counted as 0."""
    value = opmath(convert(self, output_dtype(context)))
    if is_float(value.dtype):
        value = where(is_nan(value), 0, value)
    return sum_over(value, normalize_dims(dim, self.ndim), keepdim)


def _mean_meta(
    self: torch.Tensor,
    dim: object = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """That of the sum, which is written in C++, where the mean is one of floats."""
    if not (dtype or self.dtype).is_floating_point:
        return torch.ops.aten.mean.dim(self, dim, keepdim, dtype=dtype)
    return torch.ops.aten.sum.dim_IntList(self, dim, keepdim, dtype=dtype)


@rule(*present("mean", "mean.dim"), context=True, meta=_mean_meta)
def mean(
    context: RuleContext,
    self: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """The mean; NaN over nothing."""
    dims = normalize_dims(dim, self.ndim)
    value = opmath(convert(self, output_dtype(context)))
    return sum_over(value, dims, keepdim) / count_as(_counted(self, dims), value.dtype)


@rule(*present("prod", "prod.dim_int"), context=True)
def prod(
    context: RuleContext,
    self: Array,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """The product; bool and integers give int64."""
    value = opmath(convert(self, output_dtype(context)))
    dims = normalize_dims(dim, self.ndim)
    return jnp.prod(value, axis=dims, keepdims=keepdim, dtype=value.dtype)


@rule(*present("amax"))
def amax(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The largest element, NaN if there is one."""
    return jnp.max(self, axis=normalize_dims(dim, self.ndim), keepdims=keepdim)


@rule(*present("amin"))
def amin(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The smallest element, NaN if there is one."""
    return jnp.min(self, axis=normalize_dims(dim, self.ndim), keepdims=keepdim)


@rule(*present("aminmax", "_aminmax", "_aminmax.dim"))
def aminmax(self: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    """The smallest and the largest element."""
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


rule(*present("max"))(amax)
rule(*present("min"))(amin)


def _index_of(find: Callable[..., Array], self: Array, dim: int, keepdim: bool) -> Array:
    """The first index of an extreme, NaN being more extreme than any number."""
    if self.ndim == 0:
        return jnp.zeros((), np.int64)
    comparable = self.astype(np.uint8) if self.dtype == np.bool_ else self
    index = find(comparable, dim % self.ndim, np.int64)
    return jnp.expand_dims(index, dim % self.ndim) if keepdim else index


@rule(*present("max.dim"))
def max_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The largest elements along ``dim`` and their int64 indices."""
    return amax(self, dim, keepdim), _index_of(lax.argmax, self, dim, keepdim)


@rule(*present("min.dim"))
def min_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The smallest elements along ``dim`` and their int64 indices."""
    return amin(self, dim, keepdim), _index_of(lax.argmin, self, dim, keepdim)


def _flat_index(
    find: Callable[..., Array], context: RuleContext, self: Array, dim: int | None, keepdim: bool
) -> Array:
    if dim is None:
        flat = _index_of(find, self.reshape(-1), 0, False)
        return flat.reshape(output_shape(context))
    return _index_of(find, self, dim, keepdim)


@rule(*present("argmax"), context=True)
def argmax(
    context: RuleContext, self: Array, dim: int | None = None, keepdim: bool = False
) -> Array:
    """The index of the largest element, along ``dim`` or of the flattened array."""
    return _flat_index(lax.argmax, context, self, dim, keepdim)


@rule(*present("argmin"), context=True)
def argmin(
    context: RuleContext, self: Array, dim: int | None = None, keepdim: bool = False
) -> Array:
    """The index of the smallest element, along ``dim`` or of the flattened array."""
    return _flat_index(lax.argmin, context, self, dim, keepdim)


@rule(*present("any", "any.dim", "any.dims", "_is_any_true"))
def any_rule(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """Whether some element is not zero."""
    return jnp.any(truth(self), axis=_reduced(dim, self.ndim), keepdims=keepdim)


@rule(*present("all", "all.dim", "all.dims", "_is_all_true"))
def all_rule(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """Whether every element is not zero."""
    return jnp.all(truth(self), axis=_reduced(dim, self.ndim), keepdims=keepdim)


def _reduced(dim: Dims, rank: int) -> tuple[int, ...]:
    """As ``normalize_dims``, but an empty list reduces nothing (``any.dims``, ``all.dims``)."""
    if isinstance(dim, (list, tuple)) and not dim:
        return ()
    return normalize_dims(dim, rank)


@rule(*present("count_nonzero", "count_nonzero.dim_IntList"))
def count_nonzero(self: Array, dim: Dims = None) -> Array:
    """How many elements are not zero, int64."""
    return sum_over(truth(self).astype(np.int64), normalize_dims(dim, self.ndim))


def _freedom(count: Size, correction: TracedValue, dtype: np.dtype) -> object:
    """``max(count - correction, 0)``, what a variance is divided by."""
    correction = 1 if correction is None else correction
    if isinstance(count, int):
        return dtype.type(max(count - correction, 0))
    return jnp.maximum(count_as(count, dtype) - dtype.type(correction), 0)


def moments(
    self: Array, dims: tuple[int, ...], correction: Scalar, keepdim: bool
) -> tuple[Array, Array]:
    """Variance and mean over ``dims``, in two passes; ``correction`` None is Bessel's 1."""
    value = opmath(self)
    count = _counted(self, dims)
    real = np.zeros((), value.dtype).real.dtype
    center = sum_over(value, dims, True) / count_as(count, real)
    deviation = value - center
    squares = (
        lax.real(deviation * lax.conj(deviation))
        if is_complex(value.dtype)
        else deviation * deviation
    )
    variance = sum_over(squares, dims, keepdim) / _freedom(count, correction, real)
    return variance, center if keepdim else lax.squeeze(center, dims)


@rule(*present("var.correction"))
def var(
    self: Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> Array:
    """The variance, divided by ``n - correction`` (1 by default)."""
    return moments(self, normalize_dims(dim, self.ndim), correction, keepdim)[0]


@rule(*present("std.correction"))
def std(
    self: Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> Array:
    """The square root of the variance."""
    return lax.sqrt(var(self, dim, correction=correction, keepdim=keepdim))


@rule(*present("var_mean.correction"))
def var_mean(
    self: Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    """Variance and mean."""
    return moments(self, normalize_dims(dim, self.ndim), correction, keepdim)


@rule(*present("std_mean.correction"))
def std_mean(
    self: Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    """Standard deviation and mean."""
    variance, center = moments(self, normalize_dims(dim, self.ndim), correction, keepdim)
    return lax.sqrt(variance), center


def vector_norm(self: Array, order: Scalar, dims: tuple[int, ...], keepdim: bool = False) -> Array:
    """The ``order``-norm of the elements over ``dims``; infinities and 0 included."""
    size = complex_functions.absolute(self) if is_complex(self.dtype) else lax.abs(self)
    if order == np.inf:
        # Over nothing the norm is 0, and a norm is never negative.
        return jnp.max(size, axis=dims, keepdims=keepdim, initial=0)
    if order == -np.inf:
        return jnp.min(size, axis=dims, keepdims=keepdim)
    if order == 0:
        return sum_over((size != 0).astype(size.dtype), dims, keepdim)
    if order == 1:
        return sum_over(size, dims, keepdim)
    if order == 2:
        return lax.sqrt(sum_over(size * size, dims, keepdim))
    total = sum_over(lax.pow(size, size.dtype.type(order)), dims, keepdim)
    return lax.pow(total, size.dtype.type(1.0 / order))


def _norm_operand(context: RuleContext, self: Array, dtype: object) -> Array:
    # A real result dtype must not drop the imaginary part before the absolute value is taken.
    if is_complex(self.dtype):
        return self
    return opmath(convert(self, output_dtype(context)))


@rule(*present("linalg_vector_norm"), context=True)
def linalg_vector_norm(
    context: RuleContext,
    self: Array,
    ord: Scalar = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """The vector norm of order ``ord`` over ``dim``."""
    value = _norm_operand(context, self, dtype)
    return vector_norm(value, ord, normalize_dims(dim, self.ndim), keepdim)


@rule(
    *present(
        "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype"
    ),
    context=True,
)
def norm(
    context: RuleContext,
    self: Array,
    p: Scalar = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """The vector norm of order ``p`` (None means 2) over ``dim``."""
    value = _norm_operand(context, self, dtype)
    return vector_norm(value, 2 if p is None else p, normalize_dims(dim, self.ndim), keepdim)


@rule(*present("dist"), context=True)
def dist(context: RuleContext, self: Array, other: Array, p: Scalar = 2) -> Array:
    """The norm of order ``p`` of the difference."""
    difference = _norm_operand(context, self - other, None)
    return vector_norm(difference, p, tuple(range(difference.ndim)))


def finite_maximum(value: Array, dims: tuple[int, ...]) -> Array:
    """The maximum with its dimensions kept, 0 where it is infinite: what a softmax subtracts."""
    largest = jnp.max(value, axis=dims, keepdims=True, initial=-np.inf)
    return where(lax.abs(largest) == np.inf, 0, largest)


@rule(*present("logsumexp"), context=True)
def logsumexp(context: RuleContext, self: Array, dim: Dims, keepdim: bool = False) -> Array:
    """``log(sum(exp(self)))`` over ``dim`` without overflow."""
    value = opmath(convert(self, output_dtype(context)))
    dims = normalize_dims(dim, self.ndim)
    # of complex numbers only the real part may overflow; the angle of the logarithm is the principal one
    largest = finite_maximum(jnp.real(value), dims)
    total = lax.log(sum_over(lax.exp(value - largest), dims, True)) + largest
    return total if keepdim else lax.squeeze(total, dims)


def _hash_meta(self: object, dim: object = (), *, keepdim: bool = False, mode: int = 0) -> object:
    """PyTorch's, which takes every ``mode``; raises here what the CPU raises, with its message."""
    if mode:
        raise RuntimeError(f"hash_tensor: no mode {mode}")
    return torch.ops.aten.hash_tensor(self, dim, keepdim=keepdim)


@rule(*present("hash_tensor"), meta=_hash_meta)
def hash_tensor(self: Array, dim: Dims = (), *, keepdim: bool = False, mode: int = 0) -> Array:
    """The exclusive or of all elements' bits, each as a float64 or an int64."""
    dims = normalize_dims(dim, self.ndim)
    wide = jnp.float64 if is_float(self.dtype) else jnp.int64
    bits = lax.bitcast_convert_type(self.astype(wide), jnp.uint64)
    result = lax.reduce(bits, np.uint64(0), lax.bitwise_xor, dims)
    return jnp.expand_dims(result, dims) if keepdim else result
