"""One parameter's step of Adam, AdamW and SGD, skipped on the device where a gradient is infinite.

In place, and with the arguments of torch_xla's fused steps: ``found_inf`` and ``step`` are tensors of one
element, so that the host never waits. Everything is recorded, nothing runs.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def adam_step_(
    found_inf: torch.Tensor,
    step: torch.Tensor,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    use_adamw: bool,
) -> None:
    """One step: ``step`` counts on, ``param`` and its averages change; nothing where ``found_inf`` is not 0.

    ``max_exp_avg_sq`` is read and written with ``amsgrad`` only. With ``use_adamw`` the parameter decays by
    itself, else ``weight_decay`` times it is added to the gradient.
    """
    found = (found_inf != 0).to(torch.float32).reshape(())
    step.add_((1 - found).to(step.dtype).reshape(step.shape))
    fused = torch._fused_adamw_ if use_adamw else torch._fused_adam_
    fused(
        [param], [grad], [exp_avg], [exp_avg_sq], [max_exp_avg_sq] if amsgrad else [],
        [step.to(torch.float32).reshape(())],
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
        amsgrad=amsgrad, maximize=maximize, grad_scale=None, found_inf=found,
    )  # fmt: skip


@torch.no_grad()
def sgd_step_(
    found_inf: torch.Tensor,
    step: torch.Tensor,
    param: torch.Tensor,
    buf: torch.Tensor,
    d_p: torch.Tensor,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """One step: ``step`` counts on, ``param`` and, with momentum, ``buf`` change; as ``adam_step_``.

    ``d_p`` is the gradient and ``buf`` the average, which begins with the gradient where ``step`` is 0.
    """
    lost = (found_inf != 0).reshape(())
    gradient = -d_p if maximize else d_p
    if weight_decay:
        gradient = gradient + weight_decay * param
    if momentum:
        average = momentum * buf + (1 - dampening) * gradient
        average = torch.where(step.reshape(()) == 0, gradient, average)
        gradient = gradient + momentum * average if nesterov else average
        buf.copy_(torch.where(lost, buf, average))
    param.copy_(torch.where(lost, param, param - lr * gradient))
    step.copy_(torch.where(lost, step, step + 1))
