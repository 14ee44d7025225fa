"""Losses and their gradients.

``reduction`` is 0 for none, 1 for the mean, 2 for the sum. Class indices outside the classes
follow XLA (clamped) where PyTorch on the CPU raises.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.lowering.rules.common import opmath
from xla_core.lowering.rules.common import where as select
from xla_core.operators import target as target_device
from xla_core.operators.lowering_registry import aten, rule

_NONE, _MEAN, _SUM = range(3)


def _reduce(loss: Array, reduction: int) -> Array:
    if reduction == _MEAN:
        return jnp.mean(loss)
    return jnp.sum(loss) if reduction == _SUM else loss


def _operands(*arrays: Array) -> list[Array]:
    """The arrays broadcast to one shape, in one dtype wide enough to compute in."""
    wide = [opmath(array) for array in arrays]
    dtype = jnp.result_type(*wide)
    return jnp.broadcast_arrays(*(array.astype(dtype) for array in wide))


def _scale(grad: Array, reduction: int, like: Array) -> Array:
    """The incoming gradient, spread over the elements that were averaged."""
    wide = grad.astype(like.dtype)
    return wide / max(like.size, 1) if reduction == _MEAN else wide


# Negative log likelihood. Classes lie along axis 1, or axis 0 of an unbatched input.


def _class_axis(scores: Array) -> int:
    return 1 if scores.ndim > 1 else 0


def _target_weights(scores: Array, target: Array, weight: Array | None, ignore_index: int) -> Array:
    """The weight of each target, 0 where it is ignored, in the dtype of the computation."""
    dtype = opmath(scores[:0]).dtype if scores.ndim else scores.dtype
    kept = target != ignore_index
    if weight is None:
        return kept.astype(dtype)
    rows = weight.at[select(kept, target, 0)].get(mode="promise_in_bounds")
    return select(kept, rows.astype(dtype), 0)


def _is_class(chosen: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Where the number of the class, along ``axis`` of ``shape``, is that in ``chosen``."""
    # uint8 holds fewer numbers than there may be classes
    wide = chosen.astype(np.int32) if chosen.dtype.itemsize == 1 else chosen
    return lax.broadcasted_iota(wide.dtype, shape, axis) == wide


def _at_class(scores: Array, chosen: Array, axis: int) -> Array:
    """The score of each target's class; ``chosen`` has size 1 along the classes.

    On a TPU a sum over the classes of which all but one are zero: it is one fusion with the logarithm of the
    softmax in front of it, where a gather needs all scores in memory, in float32.
    """
    device = target_device.current()
    if device is not None and device.platform == "tpu":
        chosen_only = select(_is_class(chosen, scores.shape, axis), scores, 0)
        return jnp.sum(chosen_only, axis, dtype=scores.dtype)
    picked = jnp.take_along_axis(scores, chosen, axis, mode="promise_in_bounds")
    return jnp.squeeze(picked, axis)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """The loss and the sum of the targets' weights (0 without a reduction of a batch)."""
    axis = _class_axis(self)
    weights = _target_weights(self, target, weight, ignore_index)
    safe = jnp.expand_dims(select(target != ignore_index, target, 0), axis)
    picked = _at_class(self, safe, axis).astype(weights.dtype)
    # An ignored target must not let an infinite score through as 0 * inf.
    loss = select(weights == 0, 0, -picked * weights)
    if reduction == _NONE:
        # An unbatched input is summed all the same, as in PyTorch, over its one target.
        return loss, weights if weights.ndim == 0 else jnp.zeros((), self.dtype)
    total, summed = jnp.sum(weights), jnp.sum(loss)
    return (summed / total if reduction == _MEAN else summed), total


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad_output: Array,
    self: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
) -> Array:
    """Minus the target's weight at the target's class, zero elsewhere: one fused selection."""
    axis = _class_axis(self)
    weights = _target_weights(self, target, weight, ignore_index)
    grad = grad_output.astype(weights.dtype)
    if reduction == _MEAN:
        grad = grad / total_weight.astype(weights.dtype)
    value = select(weights == 0, 0, -grad * weights)
    chosen = _is_class(jnp.expand_dims(target, axis), self.shape, axis)
    return select(chosen, jnp.expand_dims(value, axis), 0).astype(self.dtype)


# Element-wise losses.


@rule(aten.mse_loss.default)
def mse_loss(self: Array, target: Array, reduction: int = 1) -> Array:
    """Squared difference."""
    x, t = _operands(self, target)
    return _reduce(jnp.square(x - t), reduction)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(grad_output: Array, self: Array, target: Array, reduction: int) -> Array:
    """The gradient of ``mse_loss``."""
    x, t = _operands(self, target)
    return (x - t) * (_scale(grad_output, reduction, x) * 2)


@rule(aten.smooth_l1_loss.default)
def smooth_l1_loss(self: Array, target: Array, reduction: int = 1, beta: float = 1.0) -> Array:
    """Quadratic below ``beta``, linear above."""
    x, t = _operands(self, target)
    gap = jnp.abs(x - t)
    if beta != 0:
        gap = select(gap < beta, gap * gap * (0.5 / beta), gap - 0.5 * beta)
    return _reduce(gap, reduction)


@rule(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    grad_output: Array, self: Array, target: Array, reduction: int, beta: float
) -> Array:
    """The gradient of ``smooth_l1_loss``."""
    x, t = _operands(self, target)
    gap = x - t
    slope = jnp.sign(gap) if beta == 0 else jnp.clip(gap / beta, -1, 1)
    return slope * _scale(grad_output, reduction, x)


@rule(aten.huber_loss.default)
def huber_loss(self: Array, target: Array, reduction: int = 1, delta: float = 1.0) -> Array:
    """Quadratic up to ``delta``, linear above, without ``smooth_l1_loss``'s division."""
    x, t = _operands(self, target)
    gap = jnp.abs(x - t)
    return _reduce(select(gap <= delta, 0.5 * gap * gap, delta * (gap - 0.5 * delta)), reduction)


@rule(aten.huber_loss_backward.default)
def huber_loss_backward(
    grad_output: Array, self: Array, target: Array, reduction: int, delta: float
) -> Array:
    """The gradient of ``huber_loss``."""
    x, t = _operands(self, target)
    return jnp.clip(x - t, -delta, delta) * _scale(grad_output, reduction, x)


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    self: Array, target: Array, weight: Array | None = None, reduction: int = 1
) -> Array:
    """Cross entropy of probabilities, with PyTorch's floor of -100 under the logarithms."""
    x, t = _operands(self, target)
    loss = (t - 1) * jnp.maximum(jnp.log1p(-x), -100) - t * jnp.maximum(jnp.log(x), -100)
    if weight is not None:
        loss = loss * weight.astype(loss.dtype)
    return _reduce(loss, reduction)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad_output: Array,
    self: Array,
    target: Array,
    weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    """The gradient of ``binary_cross_entropy``, with PyTorch's floor of 1e-12 in the divisor."""
    x, t = _operands(self, target)
    grad = _scale(grad_output, reduction, x) * (x - t) / jnp.maximum((1 - x) * x, 1e-12)
    return grad if weight is None else grad * weight.astype(grad.dtype)


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    self: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    """Cross entropy of logits, in the form that neither overflows nor cancels."""
    x, t = _operands(self, target)
    softplus = jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0)
    if pos_weight is not None:
        softplus = softplus * ((pos_weight.astype(x.dtype) - 1) * t + 1)
    loss = (1 - t) * x + softplus
    if weight is not None:
        loss = loss * weight.astype(loss.dtype)
    return _reduce(loss, reduction)


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(self: Array, target: Array, reduction: int = 1) -> Array:
    """``log(1 + exp(-target * self))``."""
    x, t = _operands(self, target)
    return _reduce(jnp.log1p(jnp.exp(-t * x)), reduction)


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    grad_output: Array, self: Array, target: Array, reduction: int
) -> Array:
    """The gradient of ``soft_margin_loss``."""
    x, t = _operands(self, target)
    return -t * jax.nn.sigmoid(-t * x) * _scale(grad_output, reduction, x)


# Distances.


def _norm(gap: Array, p: float) -> Array:
    """The p-norm over the last axis."""
    size = jnp.abs(gap)
    if p == 0:
        return jnp.sum((gap != 0).astype(gap.dtype), -1)
    if p == 1:
        return jnp.sum(size, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(gap * gap, -1))
    if p == np.inf:
        return jnp.max(size, -1, initial=0)
    return jnp.sum(size**p, -1) ** (1 / p)


def _norm_backward(grad: Array, gap: Array, p: float, dist: Array) -> Array:
    """The gradient of ``_norm`` by ``gap``; zero where the distance is zero."""
    grad, dist = grad[..., None], dist[..., None]
    if p == 0:
        return jnp.zeros_like(gap)
    if p == 1:
        return jnp.sign(gap) * grad
    if p == np.inf:
        return jnp.sign(gap) * (jnp.abs(gap) == dist).astype(gap.dtype) * grad
    safe = select(dist == 0, 1, dist)
    if p == 2:
        return select(dist == 0, 0, grad * gap / safe)
    power = select(gap == 0, 0, jnp.abs(select(gap == 0, 1, gap)) ** (p - 1))
    return select(dist == 0, 0, jnp.sign(gap) * power * (grad / safe ** (p - 1)))


def _gaps(x1: Array, x2: Array) -> Array:
    return x1[..., :, None, :] - x2[..., None, :, :]


# PyTorch takes the product form of the Euclidean distance above this many rows.
_PRODUCT_ROWS = 25


@rule(aten._euclidean_dist.default)
def euclidean_dist(x1: Array, x2: Array) -> Array:
    """Euclidean distances between rows through one matrix product."""
    squares = jnp.sum(x1 * x1, -1)[..., :, None] + jnp.sum(x2 * x2, -1)[..., None, :]
    crossed = jnp.einsum("...im,...jm->...ij", x1, x2)
    return jnp.sqrt(jnp.maximum(squares - 2 * crossed, 0))


@rule(aten._cdist_forward.default)
def cdist_forward(x1: Array, x2: Array, p: float, compute_mode: int | None) -> Array:
    """Distances between the rows of ``x1`` and ``x2``; batch dimensions broadcast."""
    gaps = partial(_distances, p=p)
    if p != 2 or compute_mode == 2:
        return gaps(x1, x2)
    large = [symbolic_sizes.is_above(x.shape[-2], _PRODUCT_ROWS) for x in (x1, x2)]
    if compute_mode == 1 or any(answer is True for answer in large):
        return euclidean_dist(x1, x2)
    if all(answer is False for answer in large):
        return gaps(x1, x2)
    return lax.cond(jnp.any(jnp.stack(large)), euclidean_dist, gaps, x1, x2)


def _distances(x1: Array, x2: Array, p: float) -> Array:
    return _norm(_gaps(x1, x2), p)


@rule(aten._cdist_backward.default)
def cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    """The gradient of ``_cdist_forward`` by ``x1``, whose batch dimensions are broadcast as there.

    They are not where there is nothing to sum.
    """
    if not (grad.size and x1.size and x2.size):
        return jnp.zeros_like(x1)
    return jnp.sum(_norm_backward(grad, _gaps(x1, x2), p, cdist), -2)


@rule(aten._pdist_forward.default)
def pdist_forward(self: Array, p: float = 2.0) -> Array:
    """Distances between all pairs of rows, first row first."""
    first, second = np.triu_indices(self.shape[0], 1)
    return _norm(self[first] - self[second], p)


@rule(aten._pdist_backward.default)
def pdist_backward(grad: Array, self: Array, p: float, pdist: Array) -> Array:
    """The gradient of ``_pdist_forward``."""
    first, second = np.triu_indices(self.shape[0], 1)
    by_gap = _norm_backward(grad, self[first] - self[second], p, pdist)
    return jnp.zeros_like(self).at[first].add(by_gap).at[second].add(-by_gap)
