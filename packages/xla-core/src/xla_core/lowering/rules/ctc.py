"""Connectionist temporal classification (Graves et al. 2006, section 4) and its gradient.

The lengths are operands, so that a program serves every batch of the same padded shapes.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array, lax

from xla_core.lowering.rules.common import where as select
from xla_core.operators.lowering_registry import aten, rule
from xla_core.torch_bridge.operands import Operand


def _loss_meta(
    log_probs: torch.Tensor, targets: torch.Tensor, *settings: Operand
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch, classes = log_probs.shape
    blank = settings[2] if len(settings) > 2 else 0
    if not 0 <= blank < classes:
        raise RuntimeError(f"blank must be in label range, got {blank} of {classes} classes")
    for name, lengths in zip(("input_lengths", "target_lengths"), settings, strict=False):
        if lengths.shape != (batch,):
            raise RuntimeError(
                f"{name} must be of size batch_size: {batch}, got {tuple(lengths.shape)}"
            )
    states = 2 * targets.shape[-1] + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, states)


def _gradient_meta(_grad: torch.Tensor, log_probs: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _labels(targets: Array, lengths: Array, blank: int) -> Array:
    """Each row's targets with blanks around and between, ``[batch, states]``."""
    if targets.ndim == 1:
        # Concatenated targets: every row reads from where its own begin.
        places = (jnp.cumsum(lengths) - lengths)[:, None] + jnp.arange(targets.shape[0])
        targets = jnp.take(targets, places, mode="clip")
    inner = jnp.stack([targets, jnp.full_like(targets, blank)], -1)
    inner = inner.reshape(targets.shape[0], 2 * targets.shape[1])
    return jnp.pad(inner, ((0, 0), (1, 0)), constant_values=blank)


def _shifted(states: Array, by: int) -> Array:
    """The states ``by`` places before (after, if negative), impossible beyond the end."""
    filler = jnp.full((states.shape[0], min(abs(by), states.shape[1])), -jnp.inf, states.dtype)
    if by > 0:
        return jnp.concatenate([filler, states[:, :-by]], 1)
    return jnp.concatenate([states[:, -by:], filler], 1)


def _log_sum(*terms: Array) -> Array:
    """The logarithm of a sum of exponentials, also where all terms are impossible."""
    top = terms[0]
    for term in terms[1:]:
        top = jnp.maximum(top, term)
    safe = select(jnp.isneginf(top), 0, top)
    return jnp.log(sum(jnp.exp(term - safe) for term in terms)) + safe


class _Lattice:
    """The states of one batch: labels, emissions over time, and which states may be skipped to."""

    def __init__(
        self, log_probs: Array, targets: Array, input_lengths: Array, lengths: Array, blank: int
    ) -> None:
        self.input_lengths, self.lengths = input_lengths[:, None], lengths[:, None]
        self.labels = _labels(targets, lengths, blank)
        index = jnp.broadcast_to(self.labels, (log_probs.shape[0], *self.labels.shape))
        self.emissions = jnp.take_along_axis(log_probs, index, 2, mode="clip")
        states = self.labels.shape[1]
        before = jnp.pad(self.labels, ((0, 0), (2, 0)), constant_values=blank)[:, :states]
        after = jnp.pad(self.labels, ((0, 0), (0, 2)), constant_values=blank)[:, 2:]
        self.enter = (self.labels != blank) & (self.labels != before)
        self.leave = (self.labels != blank) & (self.labels != after)
        self.place = jnp.arange(states)[None]
        self.times = jnp.arange(log_probs.shape[0])

    def forward(self) -> Array:
        """Log probabilities of all ways into each state, ``[time, batch, states]``."""
        impossible = jnp.full(self.labels.shape, -jnp.inf, self.emissions.dtype)
        first = (self.place == 0) | ((self.place == 1) & (self.lengths > 0))

        def step(alpha: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
            time, emission = given
            skipped = select(self.enter, _shifted(alpha, 2), -jnp.inf)
            later = _log_sum(alpha, _shifted(alpha, 1), skipped)
            reached = select(time == 0, select(first, 0, impossible), later) + emission
            return reached, reached

        return lax.scan(step, impossible, (self.times, self.emissions))[1]

    def backward(self) -> Array:
        """Log probabilities of all ways from each state to the end, ``[time, batch, states]``."""
        impossible = jnp.full(self.labels.shape, -jnp.inf, self.emissions.dtype)
        last = (self.place == 2 * self.lengths) | (self.place == 2 * self.lengths - 1)

        def step(beta: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
            time, emission = given
            skipped = select(self.leave, _shifted(beta, -2), -jnp.inf)
            earlier = _log_sum(beta, _shifted(beta, -1), skipped)
            begun = select(time == self.input_lengths - 1, select(last, 0, impossible), earlier)
            reached = select(time < self.input_lengths, begun + emission, impossible)
            return reached, reached

        return lax.scan(step, impossible, (self.times, self.emissions), reverse=True)[1]

    def loss(self, alpha: Array) -> Array:
        """Minus the log probability of the targets, ``[batch]``."""
        end = jnp.clip(self.input_lengths - 1, 0)[None]
        final = jnp.take_along_axis(alpha, end, 0, mode="clip")[0]
        finished = (self.place == 2 * self.lengths) | (self.place == 2 * self.lengths - 1)
        ways = select(finished, final, -jnp.inf)
        top = jnp.max(ways, 1)
        safe = select(jnp.isneginf(top), 0, top)
        total = jnp.log(jnp.sum(jnp.exp(ways - safe[:, None]), 1)) + safe
        nothing = select(self.lengths[:, 0] == 0, 0, jnp.full(top.shape, jnp.inf, alpha.dtype))
        return select(self.input_lengths[:, 0] == 0, nothing, -total)


@rule(aten._ctc_loss.Tensor, meta=_loss_meta)
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Array,
    target_lengths: Array,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """The loss of each row of a batch, and the forward variables ``[batch, time, states]``."""
    lattice = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)
    alpha = lattice.forward()
    return lattice.loss(alpha), jnp.moveaxis(alpha, 0, 1)


@rule(aten._ctc_loss_backward.Tensor, meta=_gradient_meta)
def ctc_loss_backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: Array,
    target_lengths: Array,
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool = False,
) -> Array:
    """The gradient by the logits behind ``log_probs``, as PyTorch defines it for this operator."""
    lattice = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)
    through = jnp.moveaxis(log_alpha, 1, 0) + lattice.backward()
    top = jnp.max(through, 2, keepdims=True)
    safe = select(jnp.isneginf(top), 0, top)
    classes = jnp.arange(log_probs.shape[2])
    belongs = (lattice.labels[:, :, None] == classes).astype(log_probs.dtype)
    share = jnp.einsum("tns,nsc->tnc", jnp.exp(through - safe), belongs, precision="highest")
    loss = neg_log_likelihood[None, :, None]
    observed = jnp.exp(jnp.log(share) + safe + loss - log_probs)
    by_probs = (jnp.exp(log_probs) - observed) * grad[None, :, None]
    inside = (lattice.times[:, None] < input_lengths)[:, :, None]
    if zero_infinity:
        inside = inside & ~jnp.isposinf(loss)
    return select(jnp.broadcast_to(inside, by_probs.shape), by_probs, 0)
