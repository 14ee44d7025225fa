"""The negative log likelihood for a TPU: the targets' scores are summed out, nothing is gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xla_core.lowering.rules.losses import nll_loss_backward, nll_loss_forward
from xla_core.operators.target import Target, lowering_for

IGNORED = 3


def _loss(platform, scores, target, reduction):
    def run(scores, target):
        return nll_loss_forward(scores, target, None, reduction, IGNORED)

    with lowering_for(Target(platform)):
        steps = jax.make_jaxpr(run)(scores, target)
        loss, total = jax.jit(run)(scores, target)
    return str(steps), np.asarray(loss), np.asarray(total)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 5, 3, 4)])
def test_the_loss_is_that_of_torch(shape, reduction):
    axis = 1 if len(shape) > 1 else 0
    generator = np.random.default_rng(3)
    scores = generator.normal(size=shape).astype(np.float32)
    target = generator.integers(0, 5, shape[:axis] + shape[axis + 1 :])
    if len(shape) == 1:
        target = np.asarray(2)
    else:
        scores[0, IGNORED] = -np.inf
        target.flat[0], target.flat[1] = IGNORED, 4
    found = {p: _loss(p, scores, target, reduction) for p in ("cpu", "tpu")}
    assert "gather" in found["cpu"][0]
    assert "gather" not in found["tpu"][0]
    np.testing.assert_allclose(found["tpu"][1], found["cpu"][1], rtol=1e-6)
    np.testing.assert_array_equal(found["tpu"][2], found["cpu"][2])
    wanted = torch.nn.functional.nll_loss(
        torch.from_numpy(scores), torch.from_numpy(target), ignore_index=IGNORED,
        reduction=("none", "mean", "sum")[reduction],
    )  # fmt: skip
    np.testing.assert_allclose(found["tpu"][1], wanted.numpy(), rtol=1e-6)


def test_targets_of_eight_bits_have_one_class_each():
    """300 classes: a number of a class has more bits than a target."""
    scores = np.random.default_rng(4).normal(size=(2, 300)).astype(np.float32)
    target = np.asarray([44, 0], np.uint8)
    _, loss, _ = _loss("tpu", scores, target, 0)
    np.testing.assert_array_equal(loss, -scores[[0, 1], [44, 0]])
    gradient = nll_loss_backward(
        jnp.ones(2), jnp.asarray(scores), jnp.asarray(target), None, 0, IGNORED, jnp.zeros(())
    )
    assert np.argwhere(np.asarray(gradient)).tolist() == [[0, 44], [1, 0]]
