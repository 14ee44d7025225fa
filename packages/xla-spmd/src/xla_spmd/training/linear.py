"""Linear layers and gradients in the form that torch_xla's recipes for partitioned training ask for.

Here they change nothing about how a program is partitioned: products are lowered without reshapes or
transposes around them anyway. They are the same functions under the same names.
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
        """``input`` of shape ``(..., n)``, ``weight`` of ``(m, n)``, ``bias`` of ``(m,)``: ``(..., m)``."""
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
        """Gradients by input, weight and bias, where they are asked for."""
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
    """The forward of a linear layer ``m`` by ``XLAPatchedLinear``."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(nn.Linear):
    """A linear layer whose forward is ``xla_patched_nn_linear_forward``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input @ weight.T + bias``."""
        return xla_patched_nn_linear_forward(self, input)


def apply_xla_patch_to_nn_linear(
    module: nn.Module,
    patched_function: Callable[[nn.Linear, torch.Tensor], torch.Tensor] = (
        xla_patched_nn_linear_forward
    ),
) -> nn.Module:
    """Let every ``torch.nn.Linear`` inside ``module`` compute ``patched_function(layer, input)``.

    Returns ``module``. Raises ValueError when it holds none.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ValueError(MSG_NOT_LINEAR.format(kind=type(module).__name__))
    for layer in layers:
        layer.forward = types.MethodType(patched_function, layer)  # type: ignore[method-assign]
    return module


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Let the gradients by ``m``'s positional inputs wait for each other in every backward pass.

    The compiler then does not move work of one layer's backward pass into another's, which bounds
    how many gathered weights exist at a time.
    """
    m.register_forward_pre_hook(_behind_barrier)


class _Barrier(torch.autograd.Function):
    """The same tensors; a barrier in front of their gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        return tuple(behind_barrier(gradients))


def _behind_barrier(_module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    wanted = [i for i, t in enumerate(inputs) if isinstance(t, XLATensor) and t.requires_grad]
    if not wanted:
        return inputs
    changed = dict(zip(wanted, _Barrier.apply(*(inputs[i] for i in wanted)), strict=True))
    return tuple(changed.get(i, t) for i, t in enumerate(inputs))
