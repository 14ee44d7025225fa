"""Activation functions and their gradients."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.arithmetic import clip
from xla_core.lowering.rules.common import Scalar, is_float, present, scalar, where
from xla_core.operators.lowering_registry import Promotion, rule

DEFAULT = Promotion.DEFAULT

_SQRT_HALF: Final = 0.7071067811865476
_INVERSE_SQRT_2PI: Final = 0.3989422804014327
# The tanh approximation of GELU: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
_GELU_SCALE: Final = 0.7978845608028654
_GELU_CUBE: Final = 0.044715


@rule(*present("relu"))
def relu(self: Array) -> Array:
    """``max(self, 0)``; NaN stays."""
    return lax.max(self, jnp.zeros_like(self))


@rule(*present("threshold"))
def threshold(self: Array, threshold: Scalar, value: Scalar) -> Array:
    """``self`` where it is above ``threshold``, else ``value``; NaN stays."""
    return where(self <= scalar(threshold, self.dtype), scalar(value, self.dtype), self)


@rule(*present("threshold_backward"), promotion=Promotion.NO_OPMATH)
def threshold_backward(grad_output: Array, self: Array, threshold: Scalar) -> Array:
    """``grad_output`` where ``self`` is above ``threshold`` or NaN, else 0."""
    return where(self <= threshold, jnp.zeros_like(grad_output), grad_output)


@rule(*present("leaky_relu"))
def leaky_relu(self: Array, negative_slope: float = 0.01) -> Array:
    """``self`` above zero, ``negative_slope * self`` below."""
    wide = _wide(self)
    below = wide * np.float64(negative_slope).astype(wide.dtype)
    return where(self > 0, self, below.astype(self.dtype))


@rule(*present("leaky_relu_backward"))
def leaky_relu_backward(
    grad_output: Array, self: Array, negative_slope: float, self_is_result: bool
) -> Array:
    """The gradient of ``leaky_relu``."""
    slope = np.float64(negative_slope).astype(grad_output.dtype)
    return where(self > 0, grad_output, grad_output * slope)


@rule(*present("hardtanh"), promotion=Promotion.NO_OPMATH)
def hardtanh(self: Array, min_val: Scalar = -1, max_val: Scalar = 1) -> Array:
    """``self`` limited to ``[min_val, max_val]``."""
    return clip(self, min_val, max_val)


@rule(*present("hardtanh_backward"))
def hardtanh_backward(grad_output: Array, self: Array, min_val: Scalar, max_val: Scalar) -> Array:
    """``grad_output`` strictly inside the bounds, else 0."""
    outside = (self <= min_val) | (self >= max_val)
    return where(outside, jnp.zeros_like(grad_output), grad_output)


def _elu_scales(alpha: float, scale: float, input_scale: float) -> tuple[float, float, float]:
    return float(alpha) * float(scale), float(scale), float(input_scale)


@rule(*present("elu"), promotion=DEFAULT)
def elu(self: Array, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Array:
    """``scale * x`` from zero on, ``scale * alpha * (exp(input_scale * x) - 1)`` below."""
    return where(self < 0, lax.expm1(self * input_scale) * (alpha * scale), self * scale)


@rule(*present("celu"), promotion=DEFAULT)
def celu(self: Array, alpha: Scalar = 1.0) -> Array:
    """``x`` above zero, ``alpha * (exp(x / alpha) - 1)`` below."""
    return where(self > 0, self, lax.expm1(self / alpha) * alpha)


@rule(*present("elu_backward"))
def elu_backward(
    grad_output: Array,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Array,
) -> Array:
    """The gradient of ``elu`` from its input or its result."""
    gradient, value = _wide(grad_output), _wide(self_or_result)
    negative, positive, inner = _elu_scales(alpha, scale, input_scale)
    if is_result:
        below = gradient * inner * (value + negative)
    else:
        below = gradient * (inner * negative) * lax.exp(value * inner)
    return where(value <= 0, below, gradient * positive)


def _wide(array: Array) -> Array:
    return array.astype(np.float32) if is_float(array.dtype) and array.dtype.itemsize < 4 else array


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1 + lax.erf(x * _SQRT_HALF))


def _gelu_tanh(x: Array) -> Array:
    return lax.tanh(_GELU_SCALE * (x + _GELU_CUBE * x * x * x))


@rule(*present("gelu"), promotion=DEFAULT)
def gelu(self: Array, *, approximate: str = "none") -> Array:
    """``x`` times the normal distribution's cumulative probability, or its tanh approximation."""
    if approximate == "tanh":
        return 0.5 * self * (1 + _gelu_tanh(self))
    return self * _normal_cdf(self)


@rule(*present("gelu_backward"), promotion=DEFAULT)
def gelu_backward(grad_output: Array, self: Array, *, approximate: str = "none") -> Array:
    """The gradient of ``gelu``."""
    if approximate == "tanh":
        tanh = _gelu_tanh(self)
        slope = _GELU_SCALE * (1 + 3 * _GELU_CUBE * self * self)
        return grad_output * 0.5 * ((1 + tanh) + self * (1 - tanh * tanh) * slope)
    density = lax.exp(-0.5 * self * self) * _INVERSE_SQRT_2PI
    return grad_output * (_normal_cdf(self) + self * density)


@rule(*present("silu"), promotion=DEFAULT)
def silu(self: Array) -> Array:
    """``x * sigmoid(x)``, written as the CPU kernel does so that minus infinity gives NaN."""
    return self / (1 + lax.exp(-self))


@rule(*present("silu_backward"), promotion=DEFAULT)
def silu_backward(grad_output: Array, self: Array) -> Array:
    """The gradient of ``silu``."""
    gate = lax.logistic(self)
    return grad_output * gate * (1 + self * (1 - gate))


def _softplus(x: Array) -> Array:
    return lax.log1p(lax.exp(x))


@rule(*present("mish"), promotion=DEFAULT)
def mish(self: Array) -> Array:
    """``x * tanh(log(1 + exp(x)))``."""
    return self * lax.tanh(_softplus(self))


@rule(*present("mish_backward"), promotion=DEFAULT)
def mish_backward(grad_output: Array, self: Array) -> Array:
    """The gradient of ``mish``."""
    tanh = lax.tanh(_softplus(self))
    return grad_output * (tanh + self * lax.logistic(self) * (1 - tanh * tanh))


@rule(*present("hardsigmoid"), promotion=DEFAULT)
def hardsigmoid(self: Array) -> Array:
    """``min(max(x + 3, 0), 6) / 6``."""
    return clip(self + 3, 0, 6) / 6


@rule(*present("hardsigmoid_backward"), promotion=DEFAULT)
def hardsigmoid_backward(grad_output: Array, self: Array) -> Array:
    """A sixth of ``grad_output`` strictly between -3 and 3, else 0."""
    return where((self > -3) & (self < 3), grad_output / 6, 0)


@rule(*present("hardswish"), promotion=DEFAULT)
def hardswish(self: Array) -> Array:
    """``x * hardsigmoid(x)``."""
    return self * clip(self + 3, 0, 6) / 6


@rule(*present("hardswish_backward"), promotion=DEFAULT)
def hardswish_backward(grad_output: Array, self: Array) -> Array:
    """The gradient of ``hardswish``."""
    middle = grad_output * (self / 3 + 0.5)
    return where(self <= -3, 0, where(self < 3, middle, grad_output))


@rule(*present("softplus"), promotion=DEFAULT)
def softplus(self: Array, beta: Scalar = 1, threshold: Scalar = 20) -> Array:
    """``log(1 + exp(beta x)) / beta``; ``x`` itself where ``beta x`` is above ``threshold``."""
    scaled = self * beta
    return where(scaled > threshold, self, _softplus(scaled) / beta)


@rule(*present("softplus_backward"), promotion=DEFAULT)
def softplus_backward(grad_output: Array, self: Array, beta: Scalar, threshold: Scalar) -> Array:
    """The gradient of ``softplus``."""
    scaled = self * beta
    return where(scaled > threshold, grad_output, grad_output * lax.logistic(scaled))


@rule(*present("log_sigmoid_forward"))
def log_sigmoid_forward(self: Array) -> tuple[Array, Array]:
    """``log(sigmoid(x))``, and the buffer ``exp(-abs(x))`` that the CPU kernel gives."""
    value = _wide(self)
    buffer = lax.exp(-lax.abs(value))
    return lax.min(value, jnp.zeros_like(value)) - lax.log1p(buffer), buffer


@rule(*present("log_sigmoid_backward"))
def log_sigmoid_backward(grad_output: Array, self: Array, buffer: Array) -> Array:
    """The gradient of ``log_sigmoid``: ``grad_output * sigmoid(-self)``."""
    return _wide(grad_output) * lax.logistic(-_wide(self))


@rule(*present("softshrink"), promotion=Promotion.NO_OPMATH)
def softshrink(self: Array, lambd: Scalar = 0.5) -> Array:
    """``x`` moved towards zero by ``lambd``; 0 within; NaN stays."""
    lambd = jnp.asarray(lambd).astype(self.dtype)
    moved = where(self > lambd, self - lambd, where(self < -lambd, self + lambd, self * 0))
    return moved


@rule(*present("softshrink_backward", "hardshrink_backward"))
def shrink_backward(grad_output: Array, self: Array, lambd: Scalar) -> Array:
    """0 within ``[-lambd, lambd]``, else ``grad_output``."""
    return where((self >= -lambd) & (self <= lambd), 0, grad_output)


@rule(*present("hardshrink"))
def hardshrink(self: Array, lambd: Scalar = 0.5) -> Array:
    """0 within ``[-lambd, lambd]``, else ``x``."""
    return where((self >= -lambd) & (self <= lambd), 0, self)


@rule(*present("_prelu_kernel"), promotion=DEFAULT)
def prelu(self: Array, weight: Array) -> Array:
    """``self`` above zero, ``weight * self`` below; the weight is already shaped to broadcast."""
    return where(self > 0, self, self * weight)


@rule(*present("_prelu_kernel_backward"))
def prelu_backward(grad_output: Array, self: Array, weight: Array) -> tuple[Array, Array]:
    """The gradients of ``prelu`` for its input and, not yet summed, for its weight."""
    gradient, value = _wide(grad_output), _wide(self)
    positive = value > 0
    return where(positive, gradient, gradient * _wide(weight)), where(positive, 0, gradient * value)


@rule(*present("rrelu_with_noise_backward"))
def rrelu_with_noise_backward(
    grad_output: Array,
    self: Array,
    noise: Array,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Array:
    """The gradient of ``rrelu``: through the noise in training, else through the mean slope."""
    if training and upper - lower > 1e-6:
        return grad_output * noise
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, self_is_result)


def _halves(self: Array, dim: int) -> tuple[Array, Array]:
    first, second = jnp.split(self, 2, axis=dim)
    return first, second


@rule(*present("glu"))
def glu(self: Array, dim: int = -1) -> Array:
    """The first half along ``dim`` times the sigmoid of the second."""
    first, second = _halves(_wide(self), dim)
    return first * lax.logistic(second)


@rule(*present("glu_backward"))
def glu_backward(grad_output: Array, self: Array, dim: int) -> Array:
    """The gradient of ``glu``."""
    first, second = _halves(_wide(self), dim)
    gradient, gate = _wide(grad_output), lax.logistic(second)
    inner = gradient * gate
    return lax.concatenate([inner, inner * (1 - gate) * first], dim % self.ndim)


def _like_first(first: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(first)


@rule(*present("glu_jvp"), meta=_like_first)
def glu_jvp(glu_output: Array, x: Array, dx: Array, dim: int) -> Array:
    """The tangent of ``glu`` along ``dx``."""
    _, tangent = jax.jvp(lambda v: glu(v, dim), (_wide(x),), (_wide(dx),))
    return tangent


@rule(*present("glu_backward_jvp"), meta=_like_first)
def glu_backward_jvp(
    grad_x: Array, grad_glu: Array, x: Array, dgrad_glu: Array, dx: Array, dim: int
) -> Array:
    """The tangent of ``glu_backward`` along ``dgrad_glu`` and ``dx``."""
    at, along = (_wide(grad_glu), _wide(x)), (_wide(dgrad_glu), _wide(dx))
    _, tangent = jax.jvp(lambda g, v: glu_backward(g, v, dim), at, along)
    return tangent


@rule(*present("sigmoid_backward"), promotion=DEFAULT)
def sigmoid_backward(grad_output: Array, output: Array) -> Array:
    """``grad * conj(output * (1 - output))``."""
    return (
        grad_output * lax.conj(output * (1 - output))
        if _complex(output)
        else (grad_output * (1 - output) * output)
    )


def _complex(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.complexfloating)


@rule(*present("tanh_backward"), promotion=DEFAULT)
def tanh_backward(grad_output: Array, output: Array) -> Array:
    """``grad * conj(1 - output**2)``."""
    slope = 1 - output * output
    return grad_output * (lax.conj(slope) if _complex(output) else slope)


@rule(*present("logit_backward"), promotion=DEFAULT)
def logit_backward(grad_output: Array, self: Array, eps: float | None = None) -> Array:
    """``grad / (x (1 - x))``; 0 outside ``[eps, 1 - eps]``, and NaN outside [0, 1] without eps."""
    slope = grad_output / (self * (1 - self))
    if eps is None:
        return where((self < 0) | (self > 1), np.nan, slope)
    return where((self < eps) | (self > 1 - eps), 0, slope)
