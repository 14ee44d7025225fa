"""The linear layers and gradient barriers that torch_xla's recipes for partitioned training use.

In torch_xla, the layers avoid reshapes and transposes that make partitioning worse. Here products are lowered
without them anyway, so that the layers do not change how a program is partitioned.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from xla_core.extension_api.operators import Gradients, behind_barrier
from xla_core.extension_api.tensors import XLATensor

MSG_NOT_LINEAR: Final = (
    "apply_xla_patch_to_nn_linear needs a module that holds torch.nn.Linear layers; {kind} has none"
)


class XLAPatchedLinear(torch.autograd.Function):
    """``input @ weight.T + bias`` without merging the dimensions of ``input``, in both directions."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``input @ weight.T + bias``, of shape ``(..., m)``.

        ``input`` has shape ``(..., n)``, ``weight`` ``(m, n)``, and ``bias`` ``(m,)`` (default: no bias). Under
        autocast, all are cast to its dtype.
        """
        if torch.is_autocast_enabled("xla"):
            dtype = torch.get_autocast_dtype("xla")
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        product = torch.einsum("...n,mn->...m", input, weight)
        return product if bias is None else product + bias

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradients by input, weight and bias; None for those that are not needed."""
        input, weight = ctx.saved_tensors
        (gradient,) = gradients
        by_input = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_input = torch.einsum("...m,mn->...n", gradient, weight)
        if ctx.needs_input_grad[1]:
            by_weight = torch.einsum("...m,...n->mn", gradient, input)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            by_bias = torch.einsum("...m->m", gradient)
        return by_input, by_weight, by_bias


def xla_patched_nn_linear_forward(m: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """``XLAPatchedLinear`` of ``input`` with weight and bias of the layer ``m``."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(nn.Linear):
    """A linear layer whose forward is ``xla_patched_nn_linear_forward``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input @ weight.T + bias``, by ``XLAPatchedLinear``."""
        return xla_patched_nn_linear_forward(self, input)


def apply_xla_patch_to_nn_linear(
    module: nn.Module,
    patched_function: Callable[[nn.Linear, torch.Tensor], torch.Tensor] = (
        xla_patched_nn_linear_forward
    ),
) -> nn.Module:
    """Replace the forward of each ``torch.nn.Linear`` in ``module`` by ``patched_function(layer, input)``.

    ``patched_function`` defaults to ``xla_patched_nn_linear_forward``. Returns ``module``. Raises ValueError if it
    has no linear layer.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ValueError(MSG_NOT_LINEAR.format(kind=type(module).__name__))
    for layer in layers:
        layer.forward = types.MethodType(patched_function, layer)  # type: ignore[method-assign]
    return module


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Put a barrier around the gradients of ``m``'s positional inputs in every backward pass.

    The compiler then does not move operations from one layer's backward pass into another's. This bounds the number
    of gathered weights that exist at a time.
    """
    m.register_forward_pre_hook(_behind_barrier)


class _Barrier(torch.autograd.Function):
    """The same tensors; none of their gradients is used before all of them are computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        return tuple(behind_barrier(gradients))


def _behind_barrier(_module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    positions = [i for i, t in enumerate(inputs) if isinstance(t, XLATensor) and t.requires_grad]
    if not positions:
        return inputs
    outputs = _Barrier.apply(*(inputs[i] for i in positions))
    by_position = dict(zip(positions, outputs, strict=True))
    return tuple(by_position.get(i, t) for i, t in enumerate(inputs))
