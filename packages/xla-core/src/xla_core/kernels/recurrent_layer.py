"""One layer of a recurrent net in one direction as one operator, whose time steps are a loop of the program.

The operator takes the input's contribution to all gates of all time steps, which is one large product outside of
the loop. The number of time steps is a size like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch.autograd.function import FunctionCtx

from xla_core.kernels.kernel_operator import operator
from xla_core.torch_bridge.operands import Gradients, Operand

LSTM: Final = "lstm"
GRU: Final = "gru"

# ``present`` (time, batch) says where a sequence has an element; at other times its state does not change.
_SCHEMA: Final = (
    "Tensor gates, Tensor h, Tensor c, Tensor w_hh, Tensor? b_hh, Tensor? w_hr, Tensor? present, "
    "str kind, bool reverse"
)


class RecurrentLayer(torch.autograd.Function):
    """``apply(gates, h, c, w_hh, b_hh, w_hr, present, kind, reverse)`` returns output, last state and last cell.

    ``gates`` (time, batch, width of the gates) is the product with the input, ``h`` and ``c`` are the first state
    and cell. Unless ``kind`` is ``LSTM``, ``c`` is any tensor like ``h``.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, *args: Operand
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operator."""
        ctx.save_for_backward(*args[:7])
        ctx.how = args[7:]
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.xla.recurrent_layer(
            *args
        )
        return results

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradients of all floating-point operands; by PyTorch's operators if they need gradients, too."""
        if torch.is_grad_enabled():
            return *_differentiable(gradients, ctx.saved_tensors, *ctx.how), None, None, None
        saved = ctx.saved_tensors
        derivatives = iter(
            torch.ops.xla.recurrent_layer_backward(list(gradients), *saved, *ctx.how)
        )
        floats = [next(derivatives) if t is not None else None for t in saved[:6]]
        return *floats, None, None, None


# -- the operators --------------------------------------------------------------------------------


def _shapes(
    gates: torch.Tensor, h: torch.Tensor, c: torch.Tensor, *_rest: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    """The states of all time steps, which run backwards if ``reverse``, the last state and the last cell."""

    def step(
        state: tuple[Array, Array], item: tuple[Array, Array | None]
    ) -> tuple[tuple[Array, Array], Array]:
        x, here = item
        after = _cell(_JAX, x, *state, w_hh, b_hh, w_hr, kind)
        if here is not None:
            after = tuple(jnp.where(here[:, None], a, b) for a, b in zip(after, state, strict=True))
        return after, after[0]

    (last, cell), output = lax.scan(step, (h, c), (gates, present), reverse=reverse)
    return output, last, cell


_Tensor: TypeAlias = Array | torch.Tensor
_Activation: TypeAlias = Callable[[_Tensor], _Tensor]


class _Functions(NamedTuple):
    """The functions of a cell; ``parts(x, n)`` cuts the second dimension into ``n`` equal parts."""

    sigmoid: _Activation
    tanh: _Activation
    relu: _Activation
    parts: Callable[[_Tensor, int], Sequence[_Tensor]]


_JAX: Final = _Functions(jax.nn.sigmoid, jnp.tanh, jax.nn.relu, lambda x, n: jnp.split(x, n, 1))
_TORCH: Final = _Functions(torch.sigmoid, torch.tanh, torch.relu, lambda x, n: x.chunk(n, 1))


def _cell(
    by: _Functions,
    x: _Tensor,
    h: _Tensor,
    c: _Tensor,
    w_hh: _Tensor,
    b_hh: _Tensor | None,
    w_hr: _Tensor | None,
    kind: str,
) -> tuple[_Tensor, _Tensor]:
    """The state and the cell after one time step; ``x`` is the input's contribution to the gates.

    Tensors are jax's or PyTorch's, depending on the functions ``by``.
    """
    other = h @ w_hh.T
    if b_hh is not None:
        other = other + b_hh
    if kind == LSTM:
        enter, forget, new, leave = by.parts(x + other, 4)
        c = by.sigmoid(forget) * c + by.sigmoid(enter) * by.tanh(new)
        h = by.sigmoid(leave) * by.tanh(c)
        return (h if w_hr is None else h @ w_hr.T), c
    if kind == GRU:
        x_reset, x_update, x_new = by.parts(x, 3)
        h_reset, h_update, h_new = by.parts(other, 3)
        new = by.tanh(x_new + by.sigmoid(x_reset + h_reset) * h_new)
        return (h - new) * by.sigmoid(x_update + h_update) + new, c
    activation = by.tanh if kind == "rnn_tanh" else by.relu
    return activation(x + other), c


@operator(f"recurrent_layer_backward(Tensor[] grads, {_SCHEMA}) -> Tensor[]", _gradient_shapes)
def lower_gradient(grads: Sequence[Array], *args: Operand) -> list[Array]:
    """The gradients of all floating-point operands that are not None."""
    floats = args[:6]

    def layer(*operands: Array) -> object:
        everything = (*operands, *args[6:])
        return lower_layer(*everything)

    derivatives = jax.vjp(layer, *floats)[1](tuple(grads))
    return [d for d, operand in zip(derivatives, floats, strict=True) if operand is not None]


# -- gradients of gradients -----------------------------------------------------------------------


def _differentiable(
    gradients: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor | None],
    kind: str,
    reverse: bool,
) -> Iterator[torch.Tensor | None]:
    """The gradients of the six floating-point operands, computed by PyTorch's operators for each time step."""
    # views, which are separate in the graph, because one operand may have been computed from another
    operands = [t if t is None else t.view_as(t) for t in saved]
    wanted = [t for t in operands[:6] if t is not None and t.requires_grad]
    results = zip(_by_steps(operands, kind, reverse), gradients, strict=True)
    roots, along = zip(*((y, dy) for y, dy in results if y.requires_grad), strict=True)
    derivatives = iter(
        torch.autograd.grad(roots, wanted, along, create_graph=True, allow_unused=True)
    )
    return (next(derivatives) if t is not None and t.requires_grad else None for t in operands[:6])


def _by_steps(operands: Sequence[Operand], kind: str, reverse: bool) -> tuple[torch.Tensor, ...]:
    """The results of ``xla::recurrent_layer`` for its seven tensors, computed by PyTorch's operators."""
    gates, h, c, w_hh, b_hh, w_hr, present = operands
    state: tuple[torch.Tensor, torch.Tensor] = (h, c)
    outputs: list[torch.Tensor] = []
    times = range(gates.shape[0])
    for time in reversed(times) if reverse else times:
        after = _cell(_TORCH, gates[time], *state, w_hh, b_hh, w_hr, kind)
        if present is not None:
            here = present[time, :, None]
            after = after[0].where(here, state[0]), after[1].where(here, state[1])
        state = after
        outputs.append(after[0])
    return torch.stack(outputs[::-1] if reverse else outputs), *state
