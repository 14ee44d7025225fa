"""What follows the linear layers in a cell of a recurrent network.

PyTorch has these operators for CUDA; here ``torch_bridge.whole_operators`` records them. They compute what the
plain operators in PyTorch's own definition of the cell compute, in that order.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array, lax

from xla_core.lowering.rules.activations import sigmoid_backward, tanh_backward
from xla_core.lowering.rules.common import opmath
from xla_core.operators.lowering_registry import aten, rule


def _lstm_meta(
    gates: torch.Tensor, _hidden_gates: torch.Tensor, cx: torch.Tensor, *_biases: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)


@rule(aten._thnn_fused_lstm_cell.default, meta=_lstm_meta)
def lstm_cell(
    input_gates: Array,
    hidden_gates: Array,
    cx: Array,
    input_bias: Array | None = None,
    hidden_bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The next hidden state and cell state, and all gates after their activations."""
    total = opmath(hidden_gates) + opmath(input_gates)
    for bias in (input_bias, hidden_bias):
        if bias is not None:
            total = total + opmath(bias)
    i, f, g, o = jnp.split(total, 4, axis=1)
    i, f, g, o = lax.logistic(i), lax.logistic(f), lax.tanh(g), lax.logistic(o)
    cy = f * opmath(cx) + i * g
    return o * lax.tanh(cy), cy, jnp.concatenate([i, f, g, o], axis=1)


def _lstm_backward_meta(
    _grad_hy: object,
    _grad_cy: object,
    cx: torch.Tensor,
    _cy: object,
    gates: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    of_bias = gates.new_empty(gates.shape[1]) if has_bias else None
    return torch.empty_like(gates), torch.empty_like(cx), of_bias


@rule(aten._thnn_fused_lstm_cell_backward_impl.default, meta=_lstm_backward_meta)
def lstm_cell_backward(
    grad_hy: Array | None,
    grad_cy: Array | None,
    cx: Array,
    cy: Array,
    workspace: Array,
    has_bias: bool,
) -> tuple[Array, Array, Array | None]:
    """The gradients of the gates, of the former cell state, and of a bias of the gates."""
    i, f, g, o = jnp.split(opmath(workspace), 4, axis=1)
    shown = lax.tanh(opmath(cy))
    of_hy = jnp.zeros_like(shown) if grad_hy is None else opmath(grad_hy)
    of_cy = tanh_backward(of_hy * o, shown)
    if grad_cy is not None:
        of_cy = opmath(grad_cy) + of_cy
    gates = [
        sigmoid_backward(of_cy * g, i),
        sigmoid_backward(of_cy * opmath(cx), f),
        tanh_backward(of_cy * i, g),
        sigmoid_backward(of_hy * shown, o),
    ]
    of_gates = jnp.concatenate(gates, axis=1)
    return of_gates, of_cy * f, jnp.sum(of_gates, axis=0) if has_bias else None
