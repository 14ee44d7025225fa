"""One layer of a recurrent net in one direction, as one operator: its time steps are a loop of the program.

The operator takes what the input contributes to all gates of all time steps (one large product, outside of the
loop) and goes through them. How many there are is a size like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from xla_core.kernels.kernel_operator import operator

LSTM: Final = "lstm"
GRU: Final = "gru"
_ACTIVATIONS: Final = {"rnn_tanh": jnp.tanh, "rnn_relu": jax.nn.relu}

# ``present`` (time, batch) says where a sequence has an element: elsewhere its state stays as it is.
_SCHEMA: Final = (
    "Tensor gates, Tensor h, Tensor c, Tensor w_hh, Tensor? b_hh, Tensor? w_hr, Tensor? present, "
    "str kind, bool reverse"
)

MSG_TWICE: Final = (
    "gradients of gradients of recurrent nets are not there with XLA_VARYING_SHAPES=1: unset it, and the time "
    "steps are operators of PyTorch's"
)


class RecurrentLayer(torch.autograd.Function):
    """``apply(gates, h, c, w_hh, b_hh, w_hr, present, kind, reverse)``: output, last state, last cell.

    ``gates`` (time, batch, gates' width) is the product with the input; ``c`` is any tensor like ``h`` where
    ``kind`` is not ``LSTM``.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operator."""
        ctx.save_for_backward(*args[:7])
        ctx.how = args[7:]
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.xla.recurrent_layer(
            *args
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients by states and weights. Raises RuntimeError where they shall be differentiated again."""
        if torch.is_grad_enabled():
            raise RuntimeError(MSG_TWICE)
        saved = ctx.saved_tensors
        derivatives = iter(
            torch.ops.xla.recurrent_layer_backward(list(gradients), *saved, *ctx.how)
        )
        floats = [next(derivatives) if t is not None else None for t in saved[:6]]
        return *floats, None, None, None


# -- the operators --------------------------------------------------------------------------------


def _shapes(gates: Any, h: Any, c: Any, *_rest: Any) -> Any:
    return gates.new_empty(*gates.shape[:2], h.shape[1]), torch.empty_like(h), torch.empty_like(c)


def _gradient_shapes(grads: object, gates: object, h: object, c: object, *rest: object) -> object:
    return [torch.empty_like(t) for t in (gates, h, c, *rest[:3]) if t is not None]


@operator(f"recurrent_layer({_SCHEMA}) -> (Tensor, Tensor, Tensor)", _shapes)
def lower_layer(
    gates: Array,
    h: Array,
    c: Array,
    w_hh: Array,
    b_hh: Array | None,
    w_hr: Array | None,
    present: Array | None,
    kind: str,
    reverse: bool,
) -> tuple[Array, Array, Array]:
    """One step for each time, backwards if ``reverse``: the states of all, the last state and cell."""

    def step(state: tuple[Array, Array], item: tuple[Array, Any]) -> tuple[Any, Array]:
        x, here = item
        after = _cell(x, *state, w_hh, b_hh, w_hr, kind)
        if here is not None:
            after = tuple(jnp.where(here[:, None], a, b) for a, b in zip(after, state, strict=True))
        return after, after[0]

    (last, cell), output = lax.scan(step, (h, c), (gates, present), reverse=reverse)
    return output, last, cell


def _cell(
    x: Array,
    h: Array,
    c: Array,
    w_hh: Array,
    b_hh: Array | None,
    w_hr: Array | None,
    kind: str,
) -> tuple[Array, Array]:
    """State and cell after one time step; ``x`` is the input's part of the gates."""
    other = h @ w_hh.T
    if b_hh is not None:
        other = other + b_hh
    if kind == LSTM:
        enter, forget, new, leave = jnp.split(x + other, 4, 1)
        c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(enter) * jnp.tanh(new)
        h = jax.nn.sigmoid(leave) * jnp.tanh(c)
        return (h if w_hr is None else h @ w_hr.T), c
    if kind == GRU:
        x_reset, x_update, x_new = jnp.split(x, 3, 1)
        h_reset, h_update, h_new = jnp.split(other, 3, 1)
        new = jnp.tanh(x_new + jax.nn.sigmoid(x_reset + h_reset) * h_new)
        return (h - new) * jax.nn.sigmoid(x_update + h_update) + new, c
    return _ACTIVATIONS[kind](x + other), c


@operator(f"recurrent_layer_backward(Tensor[] grads, {_SCHEMA}) -> Tensor[]", _gradient_shapes)
def lower_gradient(grads: Sequence[Array], *args: Any) -> list[Array]:
    """The gradients by all floating-point operands that are there."""
    floats = args[:6]

    def layer(*operands: Any) -> object:
        everything = (*operands, *args[6:])
        return lower_layer(*everything)

    derivatives = jax.vjp(layer, *floats)[1](tuple(grads))
    return [d for d, operand in zip(derivatives, floats, strict=True) if operand is not None]
