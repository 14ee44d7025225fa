"""Tensors made from nothing: filled, ranges, identity, triangles."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering.rules.common import (
    Scalar,
    broadcast_to,
    convert,
    is_float,
    opmath_dtype,
    output_dtype,
    output_shape,
    present,
    scalar,
    where,
)
from xla_core.operators.lowering_registry import RuleContext, rule


@rule(
    *present(
        "zeros",
        "zeros_like",
        "new_zeros",
        "_efficientzerotensor",
        # Uninitialized memory does not exist in a program: zeros are as good as anything.
        "empty.memory_format",
        "empty_strided",
        "empty_like",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    ),
    context=True,
)
def zeros(context: RuleContext, *args: object, **options: object) -> Array:
    """Zeros of the promised shape and dtype."""
    return jnp.zeros(output_shape(context), output_dtype(context))


@rule(*present("ones", "ones_like", "new_ones"), context=True)
def ones(context: RuleContext, *args: object, **options: object) -> Array:
    """Ones of the promised shape and dtype."""
    return jnp.ones(output_shape(context), output_dtype(context))


@rule(
    *present("full", "full_like", "new_full"),
    lift=("fill_value",),
    context=True,
)
def full(context: RuleContext, *like_or_size_and_value: object, **options: object) -> Array:
    """The last positional argument, the fill value, in the promised shape and dtype."""
    value = convert(jnp.asarray(like_or_size_and_value[-1]), output_dtype(context))
    return broadcast_to(value, output_shape(context))


@rule(*present("scalar_tensor"), lift=("s",), context=True)
def scalar_tensor(context: RuleContext, s: Scalar, **options: object) -> Array:
    """A number as a 0-d array."""
    return convert(jnp.asarray(s), output_dtype(context))


def _number(value: Scalar, dtype: np.dtype) -> TracedValue:
    """A number, or a size that is none yet, in ``dtype``."""
    return dtype.type(value) if isinstance(value, (int, float)) else scalar(value, dtype)


def _progression(context: RuleContext, start: TracedValue, step: TracedValue) -> Array:
    """``start + i * step``, computed exactly for whole numbers and in float64 otherwise."""
    dtype, shape = output_dtype(context), output_shape(context)
    if not is_float(dtype):
        dtype = dtype if dtype.itemsize >= 4 else np.dtype(np.int64)
        return lax.iota(dtype, shape[0]) * _number(step, dtype) + _number(start, dtype)
    whole = float(start).is_integer() and float(step).is_integer()
    last = abs(start) + abs(step) * shape[0]
    compute = np.dtype(np.float32) if whole and last < 2**24 else np.dtype(np.float64)
    return lax.iota(compute, shape[0]) * compute.type(step) + compute.type(start)


@rule(*present("arange"), context=True)
def arange(context: RuleContext, end: Scalar, **options: object) -> Array:
    """0, 1, ... below ``end``."""
    return _progression(context, 0, 1)


@rule(*present("arange.start", "arange.start_step", "range", "range.step"), context=True)
def arange_from(
    context: RuleContext, start: Scalar, end: Scalar, step: Scalar = 1, **options: object
) -> Array:
    """``start``, ``start + step``, ... ; ``range`` includes ``end``, as its promised shape says."""
    return _progression(context, start, step)


def _even_steps(context: RuleContext, start: Scalar, end: Scalar, steps: int) -> Array:
    """``steps`` even steps, counted from the nearer end so that both ends are exact; never rounded."""
    dtype = output_dtype(context)
    compute = opmath_dtype(dtype) if is_float(dtype) else np.dtype(np.float64)
    if not is_float(dtype):
        # PyTorch casts the ends before it computes anything.
        start, end = convert(jnp.asarray(start), dtype), convert(jnp.asarray(end), dtype)
    start, end = jnp.asarray(start).astype(compute), jnp.asarray(end).astype(compute)
    if steps == 1:
        return start.reshape(1)
    index = lax.iota(np.int64, steps)
    step = (end - start) / (steps - 1)
    forward = start + step * index.astype(compute)
    backward = end - step * (steps - 1 - index).astype(compute)
    return where(index < steps // 2, forward, backward)


_SPAN_KINDS = ("", ".Tensor_Tensor", ".Tensor_Scalar", ".Scalar_Tensor")


@rule(*present(*(f"linspace{kind}" for kind in _SPAN_KINDS)), context=True)
def linspace(
    context: RuleContext, start: Scalar, end: Scalar, steps: int, **options: object
) -> Array:
    """``steps`` numbers from ``start`` to ``end``, both included."""
    return convert(_even_steps(context, start, end, steps), output_dtype(context))


@rule(*present(*(f"logspace{kind}" for kind in _SPAN_KINDS)), context=True)
def logspace(
    context: RuleContext,
    start: Scalar,
    end: Scalar,
    steps: int,
    base: float = 10.0,
    **options: object,
) -> Array:
    """``base`` to the power of ``steps`` even steps from ``start`` to ``end``."""
    # A single exponent is taken as it is; several are between whole ends where the result is whole.
    exponent = jnp.reshape(start, 1) if steps == 1 else _even_steps(context, start, end, steps)
    exponent = exponent.astype(np.float64)
    return convert(lax.pow(jnp.full_like(exponent, base), exponent), output_dtype(context))


def _window_meta(window_length: int, *_shape: object, **options: object) -> torch.Tensor:
    dtype = options.get("dtype") or torch.get_default_dtype()
    return torch.empty(window_length, dtype=dtype, device="meta")


@rule(
    *present("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"),
    context=True,
    meta=_window_meta,
)
def kaiser_window(
    context: RuleContext,
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    **options: object,
) -> Array:
    """Bessel functions of half an ellipse; a ``periodic`` one is that of one place more, cut."""
    dtype = output_dtype(context)
    compute = opmath_dtype(dtype)
    if window_length < 2:
        return jnp.ones(window_length, dtype)
    last = window_length if periodic else window_length - 1
    place = lax.iota(compute, window_length) * compute.type(2 / last) - compute.type(1)
    height = lax.sqrt(jnp.maximum(1 - place * place, 0))
    return (jnp.i0(compute.type(beta) * height) / jnp.i0(compute.type(beta))).astype(dtype)


@rule(*present("eye", "eye.m"), context=True)
def eye(context: RuleContext, n: int, m: int | None = None, **options: object) -> Array:
    """Ones on the diagonal, zeros elsewhere."""
    shape = output_shape(context)
    on_diagonal = lax.broadcasted_iota(np.int32, shape, 0) == lax.broadcasted_iota(
        np.int32, shape, 1
    )
    return on_diagonal.astype(output_dtype(context))


def _below(shape: tuple[int, ...], diagonal: int) -> Array:
    """Whether each place of a matrix is on or below its ``diagonal``."""
    rows = lax.broadcasted_iota(np.int32, shape[-2:], 0)
    columns = lax.broadcasted_iota(np.int32, shape[-2:], 1)
    limit = np.int32(max(min(diagonal, 2**30), -(2**30)))
    return columns - rows <= limit


@rule(*present("tril"))
def tril(self: Array, diagonal: int = 0) -> Array:
    """``self`` with what is above ``diagonal`` set to zero."""
    return where(_below(self.shape, diagonal), self, 0)


@rule(*present("triu"))
def triu(self: Array, diagonal: int = 0) -> Array:
    """``self`` with what is below ``diagonal`` set to zero."""
    return where(_below(self.shape, diagonal - 1), jnp.zeros_like(self), self)


@rule(*present("tril_indices"), context=True)
def tril_indices(
    context: RuleContext, row: int, col: int, offset: int = 0, **options: object
) -> Array:
    """Row and column numbers of a lower triangle, row by row; shape ``(2, n)``."""
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), output_dtype(context))


@rule(*present("triu_indices"), context=True)
def triu_indices(
    context: RuleContext, row: int, col: int, offset: int = 0, **options: object
) -> Array:
    """Row and column numbers of an upper triangle, row by row; shape ``(2, n)``."""
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)), output_dtype(context))
