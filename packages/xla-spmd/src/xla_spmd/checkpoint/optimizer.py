"""``prime_optimizer``: an optimizer gets the state that a checkpoint is read into."""

from __future__ import annotations

import torch

from xla_core.extension_api import training


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make the optimizer's state, which exists from its first step on, by a step with gradients of zero.

    The state lies as the parameters do. The step changes parameters (weight decay) and counts: load a
    checkpoint into both afterwards. The gradients are None then. Returns ``optimizer``.
    """
    training.sync()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    training.sync(wait=True)
    return optimizer
