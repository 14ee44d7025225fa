"""``prime_optimizer``: creates the state of an optimizer, so that a checkpoint can be read into it."""

from __future__ import annotations

import torch

from xla_core.extension_api import training


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Create the optimizer's state, which exists only after its first step, by a step with gradients of zero.

    The state is split like the parameters. The step may change parameters (weight decay) and counts as a step, so
    load a checkpoint into model and optimizer afterwards. Sets all gradients to None. Returns ``optimizer``.
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
