"""Optimizers whose step the device skips if a gradient is infinite, so that the host reads no value.

They are PyTorch's own optimizers in their fused form, which takes ``found_inf`` as an operand. ``adam_step`` and
``sgd_step`` are such steps over lists of tensors, ``adam_step_`` and ``sgd_step_`` steps of one parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from xla_core.torch_bridge.operands import Tree

Closure = Callable[[], Tree] | None
Tensors: TypeAlias = Sequence[torch.Tensor]
FoundInf: TypeAlias = torch.Tensor | float | None


class _Fused:
    """Takes the arguments of PyTorch's optimizers, with ``fused=True`` as default."""

    param_groups: list[dict[str, Tree]]
    found_inf: torch.Tensor

    def __init__(self, params: object, *args: object, **kwargs: object) -> None:
        super().__init__(params, *args, **{"fused": True, **kwargs})  # type: ignore[call-arg]

    def _step(self, step: Callable[..., object], closure: Closure, found_inf: FoundInf) -> Tree:
        # the base class's step without its wrappers: hooks run around our step
        plain = inspect.unwrap(step)
        with torch.no_grad():
            if found_inf is None:
                return plain(self, closure)
            if isinstance(found_inf, torch.Tensor):
                flag: torch.Tensor = found_inf
            else:
                device = self.param_groups[0]["params"][0].device
                flag = torch.full((), float(found_inf), device=device)
            # the attribute that torch's optimizers read and its GradScaler sets
            self.found_inf = flag.to(torch.float32)
            try:
                return plain(self, closure)
            finally:
                del self.found_inf


class SGD(_Fused, torch.optim.SGD):
    """``torch.optim.SGD`` whose ``step`` takes ``found_inf``."""

    def step(self, closure: Closure = None, found_inf: FoundInf = None) -> Tree:  # type: ignore[override]
        """One step; where ``found_inf`` (a number, or a tensor of one element) is 1, nothing changes."""
        return self._step(torch.optim.SGD.step, closure, found_inf)


class Adam(_Fused, torch.optim.Adam):
    """``torch.optim.Adam`` whose ``step`` takes ``found_inf``."""

    def step(self, closure: Closure = None, found_inf: FoundInf = None) -> Tree:  # type: ignore[override]
        """One step; where ``found_inf`` (a number, or a tensor of one element) is 1, nothing changes."""
        return self._step(torch.optim.Adam.step, closure, found_inf)


class AdamW(_Fused, torch.optim.AdamW):
    """``torch.optim.AdamW`` whose ``step`` takes ``found_inf``."""

    def step(self, closure: Closure = None, found_inf: FoundInf = None) -> Tree:  # type: ignore[override]
        """One step; where ``found_inf`` (a number, or a tensor of one element) is 1, nothing changes."""
        return self._step(torch.optim.AdamW.step, closure, found_inf)


# -- steps over lists of tensors ----------------------------------------------------------------------


def adam_step(
    found_inf: torch.Tensor,
    state_steps: Tensors,
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    *,
    amsgrad: bool,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    use_adamw: bool,
) -> None:
    """A step of Adam, or with ``use_adamw`` of AdamW, in place; nothing changes where ``found_inf`` is not 0.

    The lists have one tensor per parameter, of the parameter's shape; ``state_steps`` count the steps, and
    ``max_exp_avg_sqs`` is used with ``amsgrad`` only.
    """
    inf = _flag(found_inf)
    for i, param in enumerate(params):
        step = state_steps[i] + (~inf).to(state_steps[i].dtype)
        grad = -grads[i] if maximize else grads[i]
        value = param * (1 - lr * weight_decay) if use_adamw else param
        if weight_decay and not use_adamw:
            grad = grad + weight_decay * param
        average = torch.lerp(exp_avgs[i], grad, 1 - beta1)
        square = exp_avg_sqs[i] * beta2 + grad * grad * (1 - beta2)
        largest = torch.maximum(max_exp_avg_sqs[i], square) if amsgrad else square
        scale = largest.sqrt() / (1 - beta2**step).sqrt() + eps
        value = value - lr / (1 - beta1**step) * average / scale
        _store(inf, (param, value), (exp_avgs[i], average), (exp_avg_sqs[i], square))
        if amsgrad:
            _store(inf, (max_exp_avg_sqs[i], largest))
        _store(inf, (state_steps[i], step))


def sgd_step(
    found_inf: torch.Tensor,
    state_steps: Tensors,
    params: Tensors,
    d_p_list: Tensors,
    momentum_buffer_list: Sequence[torch.Tensor | None],
    *,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """A step of SGD in place; nothing changes where ``found_inf`` is not 0.

    The lists have one tensor per parameter. In the first step that is not skipped (``state_steps`` is 0) a momentum
    buffer gets the gradient.
    """
    inf = _flag(found_inf)
    for i, param in enumerate(params):
        grad = -d_p_list[i] if maximize else d_p_list[i]
        if weight_decay:
            grad = grad + weight_decay * param
        buffer = momentum_buffer_list[i]
        if momentum and buffer is not None:
            grown = torch.where(
                state_steps[i] == 0, grad, buffer * momentum + grad * (1 - dampening)
            )
            grad = grad + momentum * grown if nesterov else grown
            _store(inf, (buffer, grown))
        _store(inf, (param, param - lr * grad), (state_steps[i], state_steps[i] + 1))


def _flag(found_inf: torch.Tensor) -> torch.Tensor:
    return found_inf.reshape(()) != 0


def _store(skipped: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        for place, value in pairs:
            place.copy_(torch.where(skipped, place, value))


# -- steps of one parameter, with the arguments of torch_xla's C++ module ------------------------------


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
    """One step of Adam: ``step``, ``param`` and its averages change; nothing changes where ``found_inf`` is not 0.

    ``max_exp_avg_sq`` is used with ``amsgrad`` only. With ``use_adamw`` the weight decay is applied to the
    parameter, otherwise ``weight_decay`` times the parameter is added to the gradient.
    """
    adam_step(
        found_inf, [step.reshape(())], [param], [grad], [exp_avg], [exp_avg_sq], [max_exp_avg_sq],
        amsgrad=amsgrad, beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps,
        maximize=maximize, use_adamw=use_adamw,
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
    """One step of SGD: ``step``, ``param`` and, with momentum, ``buf`` change, unless ``found_inf`` is not 0.

    ``d_p`` is the gradient and ``buf`` the momentum buffer, which gets the gradient where ``step`` is 0.
    """
    sgd_step(
        found_inf, [step.reshape(())], [param], [d_p], [buf],
        weight_decay=weight_decay, momentum=momentum, lr=lr, dampening=dampening,
        nesterov=nesterov, maximize=maximize,
    )  # fmt: skip
