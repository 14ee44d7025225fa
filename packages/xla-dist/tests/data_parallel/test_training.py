"""Training on real digits: many processes do what one does with the whole batch."""

from __future__ import annotations

import dist_torch
import numpy as np
import pytest

STEPS, BATCH = 12, 64


@pytest.fixture(scope="module")
def alone():
    """The losses and weights of one process with the whole batch."""
    return {}


@pytest.mark.parametrize(("world", "how"), [(4, "xm"), (2, "ddp"), (4, "ddp views")])
def test_the_loss_curve_is_that_of_one_process(launch, alone, world, how):
    if not alone:
        ((alone["losses"], alone["weights"]),) = launch(
            1, dist_torch.trains, "alone", STEPS, BATCH
        ).join()
        assert alone["losses"][-1] < 0.8 * alone["losses"][0]
    found = launch(world, dist_torch.trains, how, STEPS, BATCH).join()
    for losses, weights in found:
        assert losses == found[0][0]
        # means of parts are summed in another order than the whole
        np.testing.assert_allclose(losses, alone["losses"], rtol=2e-5)
        for mine, first, wanted in zip(weights, found[0][1], alone["weights"], strict=True):
            np.testing.assert_array_equal(mine, first)
            np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=2e-5)
