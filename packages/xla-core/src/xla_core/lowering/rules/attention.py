"""Attention as one operator, and the kernels that PyTorch has for its CPU, for programs that call them by name.

``xla::attention`` is what ``scaled_dot_product_attention`` is recorded as where ``torch_bridge.whole_operators``
leaves it whole. Its rule computes what PyTorch's own definition by products and a softmax computes, in that order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.common import opmath
from xla_core.lowering.rules.matmul import product
from xla_core.lowering.rules.scans import safe_softmax_of, softmax_backward
from xla_core.operators.lowering_registry import aten, rule
from xla_core.torch_bridge import op_library as op_library

_OPMATH = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _attention_meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    lead = query.shape[:-1]
    wide = _OPMATH.get(query.dtype, query.dtype)
    return query.new_empty(*lead, value.shape[-1]), query.new_empty(
        *lead, key.shape[-2], dtype=wide
    )


@rule(torch.ops.xla.attention.default, meta=_attention_meta)
def attention(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float
) -> tuple[Array, Array]:
    """The attention of each query, and its weights, which half-precision operands have in float32.

    ``mask`` says which keys a query sees, or is added to its scores. A query that sees none gives 0.
    """
    part = math.sqrt(scale)
    q, k, v = (opmath(operand) for operand in (query, key, value))
    scores = product(q * part, k * part, (False, True))
    if is_causal:
        length, seen = scores.shape[-2:]
        mask = jnp.tri(length, seen, dtype=bool)
    if mask is not None:
        hidden = lax.full((), -np.inf, scores.dtype)
        scores = scores + (
            jnp.where(mask, 0, hidden) if mask.dtype == np.bool_ else mask.astype(scores.dtype)
        )
    weights = safe_softmax_of(scores, -1)
    return product(weights, v), weights


@rule(
    torch.ops.xla.attention_backward.default,
    meta=lambda _grad, query, key, value, *_: tuple(map(torch.empty_like, (query, key, value))),
)
def attention_backward(
    grad: Array, query: Array, key: Array, value: Array, weights: Array, scale: float
) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value, from the weights of ``attention``."""
    part = math.sqrt(scale)
    g, q, k, v = (opmath(operand) for operand in (grad, query, key, value))
    of_weights = product(g, v, (False, True))
    of_scores = softmax_backward(of_weights, weights, -1, None)
    of_key = product(of_scores, q * part, (True, False)) * part
    return product(of_scores, k * part) * part, of_key, product(weights, g, (True, False))


def _for_each_head(query: Array, operand: Array) -> Array:
    """Keys or values for each head of ``query``: several heads may share one."""
    return jnp.repeat(operand, query.shape[1] // operand.shape[1], 1)


def _of_shared_heads(grad: Array, operand: Array) -> Array:
    batch, heads, *rest = operand.shape
    return jnp.sum(grad.reshape(batch, heads, -1, *rest), 2)


def _transposed(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


def _scores(
    query: Array, key: Array, is_causal: bool, attn_mask: Array | None, scale: float
) -> Array:
    scores = query @ _transposed(key) * scale
    if is_causal:
        scores = jnp.where(jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool), scores, -np.inf)
    return scores if attn_mask is None else scores + attn_mask.astype(scores.dtype)


def _scale(query: Array, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    query: Array, key: Array, value: Array, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Array | None = None, scale: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The attention, and each query's logarithm of the sum of exponentials; no dropout, as on the CPU."""
    key, value = (_for_each_head(query, operand) for operand in (key, value))
    q, k, v = (opmath(operand) for operand in (query, key, value))
    scores = _scores(q, k, is_causal, attn_mask, _scale(query, scale))
    total = jax.nn.logsumexp(scores, -1)
    return (jnp.exp(scores - total[..., None]) @ v).astype(query.dtype), total


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    grad_out: Array, query: Array, key: Array, value: Array, out: Array, logsumexp: Array,
    dropout_p: float, is_causal: bool,
    *, attn_mask: Array | None = None, scale: float | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The gradients of query, key and value."""
    keys, values = (_for_each_head(query, operand) for operand in (key, value))
    grad, q, k, v = (opmath(operand) for operand in (grad_out, query, keys, values))
    factor = _scale(query, scale)
    weights = jnp.exp(_scores(q, k, is_causal, attn_mask, factor) - logsumexp[..., None])
    of_weights = grad @ _transposed(v)
    of_scores = weights * (of_weights - jnp.sum(grad * opmath(out), -1, keepdims=True)) * factor
    of_key = _of_shared_heads(_transposed(of_scores) @ q, key)
    of_value = _of_shared_heads(_transposed(weights) @ grad, value)
    return tuple(g.astype(query.dtype) for g in (of_scores @ k, of_key, of_value))
