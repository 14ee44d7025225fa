"""Device meshes, functional collectives and DTensors over processes (dist_meshes.py)."""

from __future__ import annotations

import dist_meshes
import pytest


@pytest.mark.parametrize("world", [2, 4])
def test_functional_collectives_are_gloos_on_the_device(launch, world):
    assert launch(world, dist_meshes.agree_with_gloo).join() == [True] * world


def test_uneven_slices_arrive(launch):
    assert launch(2, dist_meshes.uneven).join() == [True] * 2


def test_a_repeated_step_is_one_program(launch):
    assert launch(2, dist_meshes.repeats).join() == [True] * 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_mesh_has_the_groups_of_its_dimensions(launch, world):
    assert launch(world, dist_meshes.meshes).join() == [True] * world


@pytest.mark.parametrize("world", [2, 4])
def test_distributed_tensors(launch, world):
    assert launch(world, dist_meshes.distributed_tensors).join() == [True] * world


@pytest.mark.parametrize("case", ["random_numbers", "tensor_parallel", "without_streams"])
def test_of_distributed_tensors(launch, case):
    assert launch(2, getattr(dist_meshes, case)).join() == [True] * 2
