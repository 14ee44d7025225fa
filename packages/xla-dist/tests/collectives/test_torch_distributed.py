"""torch.distributed on the backend ``xla``: each rank checks what it gets (dist_torch.py)."""

from __future__ import annotations

import socket

import dist_torch
import pytest


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("world", "method"), [(2, "env://"), (4, "xla://")])
def test_every_collective_of_a_process_group(launch, world, method):
    job = launch(world, dist_torch.all_collectives, method, free_port())
    assert job.join() == [True] * world


def test_groups_of_a_mesh(launch):
    assert launch(4, dist_torch.mesh_groups).join() == [True] * 4


def test_functional_collectives(launch):
    assert launch(3, dist_torch.functional).join() == [True] * 3
