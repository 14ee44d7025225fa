"""Margin losses, for which PyTorch's meta kernels are missing or tell wrong shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from xla_core.lowering.rules.common import Scalar, opmath
from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import aten, rule

_NONE, _MEAN, _SUM = range(3)


# PyTorch's meta kernels make a vector of the one number that an unbatched input gives. They are
# called all the same: they raise what PyTorch raises.


def _multi_margin_meta(
    self: torch.Tensor,
    target: torch.Tensor,
    p: Scalar = 1,
    margin: Scalar = 1,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> torch.Tensor:
    aten.multi_margin_loss.default(self, target, p, margin, weight, reduction)
    return self.new_empty(target.shape if reduction == _NONE else ())


def _multilabel_margin_meta(
    self: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _, is_target = aten.multilabel_margin_loss_forward.default(self, target, reduction)
    return self.new_empty(target.shape[:-1] if reduction == _NONE else ()), is_target


def _reduce(loss: Array, reduction: int) -> Array:
    if reduction == _MEAN:
        return jnp.mean(loss)
    return jnp.sum(loss) if reduction == _SUM else loss


def _like_scores(grad_output: Array, self: torch.Tensor, *_settings: object) -> torch.Tensor:
    return torch.empty_like(self)


def _rows(a: Array) -> Array:
    """A batch of rows: an unbatched operand is a batch of one."""
    return a.reshape(-1, a.shape[-1]) if a.ndim else a.reshape(1, 1)


@rule(aten.multi_margin_loss.default, meta=_multi_margin_meta)
def multi_margin_loss(
    self: Array,
    target: Array,
    p: Scalar = 1,
    margin: Scalar = 1,
    weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    """Hinge loss over classes, with exponent ``p`` of 1 or 2."""
    wide = opmath(self)
    rows = wide if wide.ndim > 1 else wide.reshape(1, -1)
    labels = jnp.reshape(target, (-1, 1))
    own = jnp.take_along_axis(rows, labels, 1, mode="promise_in_bounds")
    gap = margin - own + rows
    gap = select((gap > 0) & (jnp.arange(rows.shape[1])[None] != labels), gap, 0)
    gap = gap if p == 1 else gap * gap
    if weight is not None:
        gap = gap * weight[labels].astype(gap.dtype)
    loss = jnp.sum(gap, axis=1) / rows.shape[1]
    return _reduce(jnp.reshape(loss, target.shape), reduction)


@rule(aten.multi_margin_loss_backward.default, meta=_like_scores)
def multi_margin_loss_backward(
    grad_output: Array,
    self: Array,
    target: Array,
    p: Scalar,
    margin: Scalar,
    weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    """The gradient of ``multi_margin_loss``."""
    function = lambda x: multi_margin_loss(x, target, p, margin, weight, reduction)  # noqa: E731
    value, pull = jax.vjp(function, opmath(self))
    return pull(jnp.broadcast_to(grad_output.astype(value.dtype), value.shape))[0]


def _target_counts(target: Array) -> Array:
    """How often each class is a target of its row, ``[rows, classes]``; -1 ends a row's targets."""
    rows = _rows(target)
    given = jnp.cumprod((rows >= 0).astype(np.int32), 1) == 1
    hits = given[:, :, None] & (rows[:, :, None] == jnp.arange(rows.shape[1]))
    return jnp.sum(hits.astype(np.int32), 1)


def _hinges(x: Array, counts: Array, is_target: Array) -> tuple[Array, Array]:
    """``1 - x[target] + x[other]`` and its weight, for all pairs of a target and another class."""
    gaps = 1 - x[:, :, None] + x[:, None, :]
    pairs = counts.astype(x.dtype)[:, :, None] * (1 - is_target.astype(x.dtype))[:, None, :]
    return gaps, pairs / x.shape[1]


@rule(aten.multilabel_margin_loss_forward.default, meta=_multilabel_margin_meta)
def multilabel_margin_loss_forward(
    self: Array, target: Array, reduction: int
) -> tuple[Array, Array]:
    """Hinge loss between each row's targets and its other classes; and which classes are targets."""
    x = _rows(opmath(self))
    counts = _target_counts(target)
    gaps, weights = _hinges(x, counts, counts > 0)
    loss = jnp.sum(jnp.maximum(gaps, 0) * weights, (1, 2))
    loss = _reduce(loss.reshape(target.shape[:-1]), reduction)
    return loss, (counts > 0).reshape(target.shape)


@rule(aten.multilabel_margin_loss_backward.default, meta=_like_scores)
def multilabel_margin_loss_backward(
    grad_output: Array, self: Array, target: Array, reduction: int, is_target: Array
) -> Array:
    """The gradient of ``multilabel_margin_loss_forward``."""
    x = _rows(opmath(self))
    gaps, weights = _hinges(x, _target_counts(target), _rows(is_target))
    active = select(gaps > 0, weights, 0)
    by_row = jnp.sum(active, 1) - jnp.sum(active, 2)
    grad = grad_output.astype(x.dtype)
    grad = grad.reshape(-1, 1) if reduction == _NONE else grad
    scale = x.shape[0] if reduction == _MEAN else 1
    return (by_row * grad / scale).reshape(self.shape)
