"""Every collective on two and four processes: forward against numpy, gradients against autograd.

The gradient is that of the sum of all replicas' losses: the reference computes all replicas in one
process, where PyTorch differentiates it.
"""

from __future__ import annotations

import dist_collectives
import dist_gradients
import numpy as np
import pytest
import torch


@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_equals_numpy(launch, world):
    found = launch(world, dist_collectives.run_all).join()
    for i, case in enumerate(dist_collectives.cases(world)):
        expected = dist_collectives.expected(case, world)
        for replica in range(world):
            for got, wanted in zip(found[replica][i], expected[replica], strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=f"{case} on {replica}")


@pytest.mark.parametrize("world", [1, 2])
def test_dimensions_that_are_not_there(launch, world):
    assert launch(world, dist_collectives.refuses_dimensions).join() == [True] * world


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_the_sum_of_all_losses(launch, world):
    found = launch(world, dist_gradients.run_all).join()
    for i, case in enumerate(dist_gradients.cases(world)):
        expected = dist_gradients.expected(case, world)
        # bfloat16: eight bits, in the results and in the gradients that come back
        tolerance = (
            {"rtol": 3e-2, "atol": 3e-2} if "bfloat16" in case else {"rtol": 2e-5, "atol": 2e-6}
        )
        for replica in range(world):
            for got, wanted in zip(found[replica][i], expected[replica], strict=True):
                torch.testing.assert_close(
                    torch.from_numpy(got), wanted.float(), **tolerance, msg=f"{case} on {replica}"
                )


def test_collectives_of_equal_layers_are_lowered_into_their_functions(launch):
    found = launch(2, dist_gradients.repeated).join()
    for (values, inside), expected in zip(found, dist_gradients.repeated_on_cpu(2), strict=True):
        assert sum(inside) > 0
        for got, wanted in zip(values, expected, strict=True):
            # float32 through twelve layers
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
