"""Random numbers and dropout, drawn from the jax PRNG key of each call."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.activations import leaky_relu
from xla_core.lowering.rules.common import (
    Scalar,
    is_complex,
    is_float,
    is_integer,
    opmath,
    opmath_dtype,
    output_dtype,
    output_shape,
    present,
    scalar,
    where,
)
from xla_core.operators.lowering_registry import RuleContext, rule

_GENERATOR: Final = ("", ".generator")


def _random_integers(key: Array, shape: tuple[int, ...], digits: int) -> Array:
    """Unsigned integers of ``digits`` random bits."""
    width = np.dtype(np.uint32) if digits <= 32 else np.dtype(np.uint64)
    bits = jax.random.bits(key, shape, width)
    return lax.shift_right_logical(bits, width.type(width.itemsize * 8 - digits))


def unit_uniform(key: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Multiples of 2**-digits in [0, 1), with the digits of ``dtype``, in its opmath dtype."""
    digits = jnp.finfo(dtype).nmant + 1
    compute = opmath_dtype(dtype)
    return _random_integers(key, shape, digits).astype(compute) * compute.type(2.0**-digits)


def open_uniform(key: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Uniform numbers strictly between 0 and 1, in the opmath dtype."""
    compute = opmath_dtype(dtype)
    digits = jnp.finfo(compute).nmant
    integers = _random_integers(key, shape, digits).astype(compute)
    return (integers + compute.type(0.5)) * compute.type(2.0**-digits)


def standard_normal(key: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Normal numbers of mean 0 and variance 1, in the opmath dtype."""
    return jax.random.normal(key, shape, opmath_dtype(dtype))


def _uniform(context: RuleContext, low: Scalar, high: Scalar) -> Array:
    dtype = output_dtype(context)
    unit = unit_uniform(context.key, output_shape(context), dtype)
    low, high = scalar(low, unit.dtype), scalar(high, unit.dtype)
    value = (unit * (high - low) + low).astype(dtype)
    # Rounding may reach the upper bound, which is not part of the interval.
    return where(value >= high.astype(dtype), low.astype(dtype), value)


@rule(*present(*(f"rand{kind}" for kind in _GENERATOR)), random=True)
def rand(context: RuleContext, size: object, **options: object) -> Array:
    """Uniform numbers in [0, 1)."""
    return _unit(context)


@rule(*present(*(f"rand_like{kind}" for kind in _GENERATOR)), random=True)
def rand_like(context: RuleContext, self: Array, **options: object) -> Array:
    """Uniform numbers in [0, 1), shaped like ``self``."""
    return _unit(context)


def _unit(context: RuleContext) -> Array:
    dtype = output_dtype(context)
    if not is_complex(dtype):
        return unit_uniform(context.key, output_shape(context), dtype)
    part = np.zeros((), dtype).real.dtype
    both = unit_uniform(context.key, (2, *output_shape(context)), part)
    return lax.complex(both[0], both[1])


@rule(*present("uniform"), lift=("from", "to"), random=True)
def uniform(context: RuleContext, self: Array, low: Scalar = 0.0, high: Scalar = 1.0) -> Array:
    """Uniform numbers in [low, high)."""
    return _uniform(context, low, high)


@rule(*present(*(f"randn{kind}" for kind in _GENERATOR)), random=True)
def randn(context: RuleContext, size: object, **options: object) -> Array:
    """Normal numbers of mean 0 and variance 1."""
    return standard_normal(context.key, output_shape(context), output_dtype(context))


@rule(*present(*(f"randn_like{kind}" for kind in _GENERATOR)), random=True)
def randn_like(context: RuleContext, self: Array, **options: object) -> Array:
    """Normal numbers of mean 0 and variance 1, shaped like ``self``."""
    return standard_normal(context.key, output_shape(context), output_dtype(context))


def _normal(context: RuleContext, mean: Scalar, std: Scalar) -> Array:
    value = standard_normal(context.key, output_shape(context), output_dtype(context))
    return value * jnp.asarray(std).astype(value.dtype) + jnp.asarray(mean).astype(value.dtype)


@rule(
    *present("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
    lift=("mean", "std"),
    random=True,
)
def normal(context: RuleContext, mean: Scalar, std: Scalar = 1.0) -> Array:
    """Normal numbers of the given means and standard deviations."""
    return _normal(context, mean, std)


@rule(*present("normal.float_float"), lift=("mean", "std"), random=True)
def normal_sized(
    context: RuleContext, mean: object, std: object, size: object, **options: object
) -> Array:
    """Normal numbers of the shape ``size``."""
    return _normal(context, mean, std)


@rule(*present("normal_functional"), lift=("mean", "std"), random=True)
def normal_functional(
    context: RuleContext, self: Array, mean: Scalar = 0.0, std: Scalar = 1.0
) -> Array:
    """Normal numbers, shaped like ``self``."""
    return _normal(context, mean, std)


def _cast_number(value: Array, dtype: np.dtype) -> Array:
    # A probability mass beyond what a small dtype holds is the caller's business, as on the CPU.
    return value.astype(dtype)


def _integers(context: RuleContext, low: int, high: int) -> Array:
    """Integers in [low, high); computed in int64 only where the bounds need it."""
    narrow = low >= -(2**31) and high <= 2**31 - 1
    drawn = jax.random.randint(
        context.key, output_shape(context), low, high, np.int32 if narrow else np.int64
    )
    return _cast_number(drawn, output_dtype(context))


@rule(*present(*(f"randint{kind}" for kind in _GENERATOR)), random=True)
def randint(context: RuleContext, high: int, size: object, **options: object) -> Array:
    """Integers in [0, high)."""
    return _integers(context, 0, high)


@rule(*present("randint.low", "randint.low_generator"), random=True)
def randint_low(
    context: RuleContext, low: int, high: int, size: object, **options: object
) -> Array:
    """Integers in [low, high)."""
    return _integers(context, low, high)


@rule(*present(*(f"randint_like{kind}" for kind in _GENERATOR)), random=True)
def randint_like(context: RuleContext, self: Array, high: int, **options: object) -> Array:
    """Integers in [0, high), shaped like ``self``."""
    return _integers(context, 0, high)


@rule(*present("randint_like.low_dtype", "randint_like.low_generator_dtype"), random=True)
def randint_like_low(
    context: RuleContext, self: Array, low: int, high: int, **options: object
) -> Array:
    """Integers in [low, high), shaped like ``self``."""
    return _integers(context, low, high)


def _whole_range(dtype: np.dtype) -> int:
    """How many different integers from 0 up ``Tensor.random_()`` draws in ``dtype``."""
    if dtype == np.bool_:
        return 2
    if is_integer(dtype):
        return int(np.iinfo(dtype).max) + 1
    return 2 ** (jnp.finfo(dtype).nmant + 1) + 1


def _all_integers(context: RuleContext) -> Array:
    dtype = output_dtype(context)
    count = _whole_range(dtype)
    if count & (count - 1):
        return _integers(context, 0, count)
    bits = count.bit_length() - 1
    return _random_integers(context.key, output_shape(context), bits).astype(dtype)


@rule(*present("random"), random=True)
def random(context: RuleContext, self: Array) -> Array:
    """Every non-negative integer that the dtype holds exactly, equally likely."""
    return _all_integers(context)


@rule(*present("random.from"), random=True)
def random_from(context: RuleContext, self: Array, low: int, high: int | None) -> Array:
    """Integers in [low, high); up to the largest of the dtype without ``high``."""
    return _integers(context, low, _whole_range(output_dtype(context)) if high is None else high)


@rule(*present("random.to"), random=True)
def random_to(context: RuleContext, self: Array, high: int) -> Array:
    """Integers in [0, high)."""
    return _integers(context, 0, high)


@rule(*present(*(f"randperm{kind}" for kind in _GENERATOR)), random=True)
def randperm(context: RuleContext, n: int, **options: object) -> Array:
    """The integers below ``n`` in random order."""
    return jax.random.permutation(context.key, n).astype(output_dtype(context))


def _chance(context: RuleContext, shape: tuple[int, ...], probability: Scalar) -> Array:
    """True with ``probability``; never for 0 and always for 1."""
    double = getattr(probability, "dtype", None) == np.float64 and jnp.ndim(probability) > 0
    unit = unit_uniform(context.key, shape, np.dtype(np.float64 if double else np.float32))
    return unit < jnp.asarray(probability).astype(unit.dtype)


@rule(*present("bernoulli"), random=True)
def bernoulli(context: RuleContext, self: Array) -> Array:
    """1 with the probability that ``self`` gives, else 0."""
    return _chance(context, self.shape, self)


@rule(*present("bernoulli.p"), lift=("p",), random=True)
def bernoulli_p(context: RuleContext, self: Array, p: Scalar = 0.5) -> Array:
    """1 with probability ``p``, else 0, shaped like ``self``."""
    return _chance(context, self.shape, p)


@rule(*present("bernoulli.Tensor"), random=True)
def bernoulli_tensor(context: RuleContext, self: Array, p: Array) -> Array:
    """1 with the probability that ``p`` gives, else 0, shaped like ``self``."""
    return _chance(context, self.shape, p)


def _sampling_dtype(context: RuleContext) -> np.dtype:
    dtype = output_dtype(context)
    return dtype if is_float(dtype) else np.dtype(np.float32)


def _open(context: RuleContext) -> Array:
    return open_uniform(context.key, output_shape(context), _sampling_dtype(context))


@rule(*present("exponential"), lift=("lambd",), random=True)
def exponential(context: RuleContext, self: Array, lambd: Scalar = 1.0) -> Array:
    """Exponentially distributed numbers of rate ``lambd``, never 0 in float32 and float64."""
    unit = _open(context)
    return -lax.log(unit) / scalar(lambd, unit.dtype)


@rule(*present("log_normal"), lift=("mean", "std"), random=True)
def log_normal(context: RuleContext, self: Array, mean: Scalar = 1.0, std: Scalar = 2.0) -> Array:
    """The exponential of normal numbers."""
    return lax.exp(_normal(context, mean, std))


@rule(*present("geometric"), lift=("p",), random=True)
def geometric(context: RuleContext, self: Array, p: Scalar) -> Array:
    """The number, from 1, of the first success among trials of probability ``p``."""
    unit = _open(context)
    return jnp.maximum(lax.ceil(lax.log(unit) / lax.log1p(-scalar(p, unit.dtype))), 1)


@rule(*present("cauchy"), lift=("median", "sigma"), random=True)
def cauchy(context: RuleContext, self: Array, median: Scalar = 0.0, sigma: Scalar = 1.0) -> Array:
    """Cauchy-distributed numbers."""
    unit = _open(context)
    tangent = lax.tan((unit - 0.5) * np.pi)
    return scalar(median, unit.dtype) + scalar(sigma, unit.dtype) * tangent


@rule(*present("poisson"), random=True)
def poisson(context: RuleContext, self: Array) -> Array:
    """Poisson-distributed counts of the given rates."""
    return jax.random.poisson(context.key, opmath(self), self.shape, np.int32)


def _binomial_meta(count: torch.Tensor, prob: torch.Tensor, *_: object) -> torch.Tensor:
    if count.dtype != prob.dtype or not count.is_floating_point():
        raise NotImplementedError  # the CPU says it in its words
    return count.new_empty(torch.broadcast_shapes(count.shape, prob.shape))


@rule(*present("binomial"), random=True, meta=_binomial_meta)
def binomial(context: RuleContext, count: Array, prob: Array) -> Array:
    """How many of ``count`` trials of probability ``prob`` succeed."""
    return jax.random.binomial(context.key, opmath(count), opmath(prob), output_shape(context))


@rule(*present("_standard_gamma"), random=True)
def standard_gamma(context: RuleContext, self: Array) -> Array:
    """Gamma-distributed numbers of shape ``self`` and scale 1."""
    return jax.random.gamma(context.key, opmath(self))


@rule(*present("_standard_gamma_grad"))
def standard_gamma_grad(self: Array, output: Array) -> Array:
    """The derivative of a gamma sample by its shape parameter."""
    return lax.random_gamma_grad(opmath(self), opmath(output))


def _dirichlet_meta(concentration: torch.Tensor, *_: object) -> torch.Tensor:
    if not concentration.is_floating_point() or not concentration.dim():
        raise NotImplementedError  # the CPU says it in its words
    return torch.empty_like(concentration)


@rule(*present("_sample_dirichlet"), random=True, meta=_dirichlet_meta)
def sample_dirichlet(context: RuleContext, self: Array) -> Array:
    """Dirichlet-distributed vectors along the last dimension."""
    return jax.random.dirichlet(context.key, opmath(self))


@rule(*present("multinomial"), random=True)
def multinomial(
    context: RuleContext, self: Array, num_samples: int, replacement: bool = False
) -> Array:
    """Indices drawn with the given weights along the last dimension."""
    logits = lax.log(opmath(self))
    if replacement:
        shape = (num_samples, *self.shape[:-1])
        drawn = jax.random.categorical(context.key, logits, axis=-1, shape=shape)
        return jnp.moveaxis(drawn, 0, -1)
    # Perturbing by Gumbel noise and taking the largest samples without replacement.
    scores = logits + jax.random.gumbel(context.key, logits.shape, logits.dtype)
    return lax.top_k(scores, num_samples)[1]


def _dropped(value: Array, kept: Array, keep_probability: float) -> Array:
    scale = 1.0 / keep_probability if keep_probability > 0 else 0.0
    return opmath(value) * (kept.astype(opmath_dtype(value.dtype)) * scale)


@rule(*present("native_dropout"), random=True)
def native_dropout(
    context: RuleContext, input: Array, p: float, train: bool | None
) -> tuple[Array, Array]:
    """``input`` with elements zeroed with probability ``p``, the others scaled up; and the mask."""
    if train is False:
        return input, jnp.ones(input.shape, np.bool_)
    kept = _chance(context, input.shape, 1.0 - p)
    return _dropped(input, kept, 1.0 - p), kept


@rule(*present("native_dropout_backward"), context=True, lift=("scale",))
def native_dropout_backward(
    context: RuleContext, grad_output: Array, mask: Array, scale: Scalar
) -> Array:
    """``grad_output * mask * scale``."""
    gradient = opmath(grad_output)
    if not jnp.issubdtype(gradient.dtype, np.inexact):
        gradient = gradient.astype(output_dtype(context))
    return gradient * (mask.astype(gradient.dtype) * scalar(scale, gradient.dtype))


@rule(*present("_fused_dropout"), random=True)
def fused_dropout(context: RuleContext, self: Array, p: float) -> tuple[Array, Array]:
    """Dropout that keeps with probability ``p``; the mask is uint8."""
    kept = _chance(context, self.shape, p)
    return _dropped(self, kept, p), kept


@rule(*present("_masked_scale"), context=True, lift=("scale",))
def masked_scale(context: RuleContext, self: Array, mask: Array, scale: Scalar) -> Array:
    """``self * mask * scale``."""
    return native_dropout_backward(context, self, mask, scale)


@rule(*present("rrelu_with_noise_functional"), random=True)
def rrelu_with_noise(
    context: RuleContext,
    self: Array,
    noise: Array,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
) -> tuple[Array, Array]:
    """Leaky ReLU with a random slope for each negative element in training; and the slopes."""
    if not training:
        return leaky_relu(self, (lower + upper) / 2), noise
    unit = unit_uniform(context.key, self.shape, self.dtype)
    slopes = where(self <= 0, unit * (upper - lower) + lower, 1).astype(self.dtype)
    return self * slopes, slopes
