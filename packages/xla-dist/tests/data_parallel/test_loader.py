"""Loaders that work in the background: order, ends, steps; each in a process with its own devices."""

from __future__ import annotations

import dist_loader
import pytest


@pytest.mark.parametrize(
    "check",
    [
        dist_loader.keeps_order_and_structure,
        dist_loader.wraps_a_loader,
        dist_loader.leaves_early,
        dist_loader.shows_what_the_dataset_raised,
        dist_loader.marks_steps,
        dist_loader.reads_ahead_so_far,
        dist_loader.applies_a_sharding,
        dist_loader.speaks_of_its_loop,
    ],
    ids=lambda check: check.__name__,
)
def test_one_device(launch, check):
    launch(1, check).join()


def test_two_devices_of_one_process(start_hosts):
    ((status, text, _),) = [
        program.join()
        for program in start_hosts(
            1, [0], dist_loader.deals_batches_to_devices, CPU_NUM_DEVICES="2"
        )
    ]
    assert status == 0, text
