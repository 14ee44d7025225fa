"""The fused optimizer steps, as functions from old to new parameters and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from xla_core.lowering.rules.common import Scalar, opmath, present, scalar, where
from xla_core.operators.lowering_registry import rule
from xla_core.torch_bridge.operands import Operand

Arrays = list[Array]


def _unscaled(grad: Array, grad_scale: Array | None) -> Array:
    value = opmath(grad)
    return value if grad_scale is None else value / grad_scale.reshape(()).astype(value.dtype)


def _unless_infinite(found_inf: Array | None, old: Arrays, new: Arrays) -> Arrays:
    """``new`` in the dtypes of ``old``; ``old`` where ``found_inf`` says to skip the step."""
    new = [value.astype(previous.dtype) for previous, value in zip(old, new, strict=True)]
    if found_inf is None:
        return new
    skip = found_inf.reshape(()) == 1
    return [where(skip, previous, value) for previous, value in zip(old, new, strict=True)]


@dataclasses.dataclass(frozen=True)
class _AdamOptions:
    """The numbers of one Adam step, and whether weight decay is decoupled (AdamW)."""

    lr: Scalar
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool
    decoupled: bool


def _adam_one(
    options: _AdamOptions,
    param: Array,
    grad: Array,
    mean: Array,
    square: Array,
    peak: Scalar,
    step: Array,
) -> tuple[Array, Array, Array, object]:
    """One parameter's Adam step in its opmath dtype; ``peak`` is AMSGrad's maximum or None."""
    dtype, lr = param.dtype, scalar(options.lr, param.dtype)
    grad = -grad if options.maximize else grad
    if options.weight_decay and options.decoupled:
        param = param - lr * options.weight_decay * param
    elif options.weight_decay:
        grad = grad + param * options.weight_decay
    mean = mean + (grad - mean) * (1 - options.beta1)
    square = square * options.beta2 + grad * grad * (1 - options.beta2)
    count = step.reshape(()).astype(dtype)
    correction1 = 1 - lax.pow(scalar(options.beta1, dtype), count)
    correction2 = 1 - lax.pow(scalar(options.beta2, dtype), count)
    peak = None if peak is None else jnp.maximum(peak, square)
    root = lax.sqrt(square if peak is None else peak) / lax.sqrt(correction2)
    return param - (lr / correction1) * mean / (root + options.eps), mean, square, peak


def _adam(
    options: _AdamOptions,
    params: Arrays,
    grads: Arrays,
    means: Arrays,
    squares: Arrays,
    peaks: Arrays,
    steps: Arrays,
    grad_scale: Array | None,
    found_inf: Array | None,
) -> Arrays:
    """New parameters, gradients, means, squares and AMSGrad maxima, one list after the other."""
    unscaled = [_unscaled(grad, grad_scale) for grad in grads]
    columns = zip(
        *(
            _adam_one(options, opmath(p), g, opmath(m), opmath(s), opmath(k) if peaks else None, t)
            for p, g, m, s, k, t in zip(
                params, unscaled, means, squares, peaks or params, steps, strict=True
            )
        ),
        strict=True,
    )
    new_params, new_means, new_squares, new_peaks = (list(column) for column in columns)
    old = [*params, *grads, *means, *squares, *peaks]
    new = [*new_params, *unscaled, *new_means, *new_squares, *(new_peaks if peaks else ())]
    return _unless_infinite(found_inf, old, new)


def _adam_rule(decoupled: bool) -> Callable[..., Arrays]:
    def step(
        self: Arrays,
        grads: Arrays,
        exp_avgs: Arrays,
        exp_avg_sqs: Arrays,
        max_exp_avg_sqs: Arrays,
        state_steps: Arrays,
        *,
        lr: Scalar,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Array | None = None,
        found_inf: Array | None = None,
    ) -> Arrays:
        lr = lr.reshape(()) if hasattr(lr, "reshape") else lr
        options = _AdamOptions(lr, beta1, beta2, weight_decay, eps, maximize, decoupled)
        peaks = list(max_exp_avg_sqs) if amsgrad else []
        results = _adam(
            options, self, grads, exp_avgs, exp_avg_sqs, peaks, state_steps, grad_scale, found_inf
        )
        return results if amsgrad else [*results, *max_exp_avg_sqs]

    return step


rule(*present("_fused_adam", "_fused_adam.tensor_lr"), lift=("lr",))(_adam_rule(False))
rule(*present("_fused_adamw", "_fused_adamw.tensor_lr"), lift=("lr",))(_adam_rule(True))


@rule(*present("_fused_sgd", "_fused_sgd.tensor_lr"), lift=("lr",))
def fused_sgd(
    self: Arrays,
    grads: Arrays,
    momentum_buffer_list: Arrays,
    *,
    weight_decay: float,
    momentum: float,
    lr: Scalar,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> Arrays:
    """New parameters, gradients and momentum buffers of one SGD step."""
    unscaled = [_unscaled(grad, grad_scale) for grad in grads]
    params, buffers = [], []
    for index, (old, gradient) in enumerate(zip(self, unscaled, strict=True)):
        param, step = opmath(old), -gradient if maximize else gradient
        step = step + weight_decay * param if weight_decay else step
        if momentum:
            buffer = step
            if not is_first_step:
                buffer = opmath(momentum_buffer_list[index]) * momentum + step * (1 - dampening)
            step = step + buffer * momentum if nesterov else buffer
            buffers.append(buffer)
        params.append(param - scalar(lr, param.dtype).reshape(()) * step)
    old_buffers = list(momentum_buffer_list)
    old = [*self, *grads, *old_buffers]
    return _unless_infinite(found_inf, old, [*params, *unscaled, *(buffers or old_buffers)])


def _adagrad(
    self: Arrays,
    grads: Arrays,
    state_sums: Arrays,
    state_steps: Arrays,
    *,
    lr: Scalar,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> Arrays:
    """New parameters, gradients and sums of squares of one Adagrad step."""
    unscaled = [_unscaled(grad, grad_scale) for grad in grads]
    params, sums = [], []
    for old, gradient, total, step in zip(self, unscaled, state_sums, state_steps, strict=True):
        param, change = opmath(old), -gradient if maximize else gradient
        change = change + weight_decay * param if weight_decay else change
        new_sum = opmath(total) + change * change
        count = step.reshape(()).astype(param.dtype)
        rate = scalar(lr, param.dtype).reshape(()) / (1 + (count - 1) * lr_decay)
        params.append(param - rate * change / (lax.sqrt(new_sum) + eps))
        sums.append(new_sum)
    return _unless_infinite(found_inf, [*self, *grads, *state_sums], [*params, *unscaled, *sums])


rule(*present("_fused_adagrad.tensor_lr"), lift=("lr",))(_adagrad)


@rule(*present("_fused_adagrad"), lift=("lr",))
def fused_adagrad(
    self: Arrays, grads: Arrays, state_sums: Arrays, state_steps: Arrays, **options: Operand
) -> Arrays:
    """As the ``tensor_lr`` overload, and the unchanged step counts as a fourth list."""
    return [*_adagrad(self, grads, state_sums, state_steps, **options), *state_steps]
