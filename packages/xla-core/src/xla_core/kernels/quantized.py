"""Products with weights of 8-bit integers."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import torch
from jax import Array, lax

from xla_core.dynamo.dynamo_backend import kept_in_graphs
from xla_core.kernels.kernel_operator import operator

MSG_NOT_THERE: Final = (
    "quantized_matmul_int8 has one scale per output; {name} is not supported. Dequantize the weights "
    "to use it"
)
MSG_SHAPES: Final = (
    "quantized_matmul_int8 multiplies (rows, inner) by int8 (columns, inner) with (columns,) scales; "
    "got {x}, {dtype} {w} and {scalar}"
)
_LARGEST: Final = 127


@kept_in_graphs
def quantized_matmul_int8(
    x: torch.Tensor,
    w: torch.Tensor,
    scalar: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    quant_block_size: torch.Tensor | None = None,
    quantize_activation: bool = False,
    batch_block_size: int | None = None,
    out_block_size: int | None = None,
    in_block_size: int | None = None,
) -> torch.Tensor:
    """``(x @ w.T) * scalar`` with int8 weights, in the dtype of ``x``.

    ``x`` is (rows, inner), ``w`` int8 (columns, inner), and ``scalar`` (columns,). With ``quantize_activation``
    (default: False) each row of ``x`` is rounded to int8, too, scaled by its largest value, and integers are
    multiplied. jax has no kernel for this, so the block sizes have no effect. Raises NotImplementedError for
    ``zero_point`` or ``quant_block_size``, ValueError for shapes that do not fit.
    """
    for name, given in (("zero_point", zero_point), ("quant_block_size", quant_block_size)):
        if given is not None:
            raise NotImplementedError(MSG_NOT_THERE.format(name=name))
    fits = x.dim() == w.dim() == 2 and x.shape[1] == w.shape[1] and w.dtype == torch.int8
    if not fits or scalar.shape != w.shape[:1]:
        shapes = {"x": tuple(x.shape), "w": tuple(w.shape), "scalar": tuple(scalar.shape)}
        raise ValueError(MSG_SHAPES.format(dtype=w.dtype, **shapes))
    return torch.ops.xla.quantized_matmul_int8(
        x, w, scalar, None, None, quantize_activation,
        batch_block_size, out_block_size, in_block_size,
    )  # fmt: skip


def _meta(x: torch.Tensor, w: torch.Tensor, *_rest: object, **_named: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@operator(
    "quantized_matmul_int8(Tensor x, Tensor w, Tensor scalar, Tensor? zero_point=None, "
    "Tensor? quant_block_size=None, bool quantize_activation=False, int? batch_block_size=None, "
    "int? out_block_size=None, int? in_block_size=None) -> Tensor",
    _meta,
)
def lower(
    x: Array,
    w: Array,
    scalar: Array,
    zero_point: Array | None = None,
    quant_block_size: Array | None = None,
    quantize_activation: bool = False,
    *_blocks: int | None,
) -> Array:
    """A product of floats, or of integers with a scale for each row."""
    if not quantize_activation:
        return product(x, w.astype(x.dtype), jnp.promote_types(x.dtype, jnp.float32)) * scalar
    rounded, scale = rounded_rows(x)
    return product(rounded, w, jnp.int32).astype(jnp.float32) * scale * scalar


def rounded_rows(x: Array) -> tuple[Array, Array]:
    """``x`` as int8, scaled by the largest value of each row (along the last dimension), and the float32 scales."""
    largest = jnp.abs(x).max(axis=-1, keepdims=True).astype(jnp.float32)
    # the scale of a row of zeros does not matter, but must not be zero
    scale = jnp.where(largest == 0, 1.0, largest / _LARGEST)
    return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale


def product(x: Array, w: Array, dtype: object) -> Array:
    """``x @ w.T``, summed in ``dtype``; ``w`` has two dimensions."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
