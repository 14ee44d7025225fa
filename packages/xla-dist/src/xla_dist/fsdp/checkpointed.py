"""``checkpoint_module``: a module whose forward pass is computed again in the backward pass."""

from __future__ import annotations

import functools

import torch
from torch import nn

from xla_core.extension_api.operators import Tree
from xla_core.extension_api.training import checkpoint


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Make ``module`` keep only its inputs for the backward pass, which computes its forward pass again.

    Replaces the module's ``forward``, and returns the module. A call without an argument that requires a gradient
    runs the original ``forward``: its backward pass would never reach the checkpoint.
    """
    original = module.forward

    @functools.wraps(original)
    def forward(*args: object, **kwargs: object) -> Tree:
        values = [*args, *kwargs.values()]
        if not any(isinstance(v, torch.Tensor) and v.requires_grad for v in values):
            return original(*args, **kwargs)

        def positional(*flat: object) -> Tree:
            named = dict(zip(kwargs, flat[len(args) :], strict=True))
            return original(*flat[: len(args)], **named)

        return checkpoint(positional, *values)

    module.forward = forward
    return module
