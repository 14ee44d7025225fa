"""What a chip sends over the network of its slice and to other slices, by arithmetic."""

from __future__ import annotations

import pytest

from xla_plan.planning.chips import CHIPS
from xla_plan.planning.search import guess, slices_of
from xla_plan.planning.traffic import Traffic
from xla_plan.steps.candidate import Candidate


def of(mesh, slices, kind, axes, nbytes=1.0):
    traffic = Traffic(tuple(mesh.items()), slices)
    getattr(traffic, kind)(nbytes, axes)
    return traffic.ici, traffic.dcn


def test_one_slice_sends_nothing_to_others():
    mesh = {"data": 2, "fsdp": 8}
    assert of(mesh, 1, "gather", ["fsdp"]) == (7 / 8, 0)
    assert of(mesh, 1, "all_reduce", ["data", "fsdp"]) == (2 * 15 / 16, 0)
    assert of(mesh, 1, "all_to_all", ["fsdp"]) == (7 / 8, 0)
    assert of(mesh, 1, "gather", ["tensor"]) == (0, 0)


def test_an_axis_within_slices_across_them_or_both():
    mesh = {"data": 2, "fsdp": 16}
    assert of(mesh, 2, "gather", ["fsdp"]) == (15 / 16, 0)
    # a copy in each slice: each chip sends what it has summed, and gets the other's
    assert of(mesh, 2, "all_reduce", ["data"]) == (0, 2 / 2)
    # over both axes, the 16 chips of a slice send a part each
    assert of(mesh, 2, "all_reduce", ["data", "fsdp"]) == (2 * 15 / 16, 2 / 2 / 16)
    assert of({"fsdp": 32}, 2, "gather", ["fsdp"]) == (15 / 16, 1 / 32)
    assert of({"fsdp": 32}, 2, "all_to_all", ["fsdp"]) == (31 / 32 - 1 / 2, 1 / 2)
    # the outer axis of two is the one that crosses, as the last varies fastest
    assert of({"fsdp": 16, "tensor": 2}, 2, "all_to_all", ["tensor"]) == (1 / 2, 0)
    assert of({"fsdp": 16, "tensor": 2}, 2, "gather", ["fsdp"]) == (7 / 8, 1 / 16)
    assert of({"tensor": 4, "fsdp": 2}, 4, "all_to_all", ["tensor"]) == (0, 3 / 4)


def test_every_chip_is_in_a_slice():
    assert [slices_of(name) for name in ("v5e:4x4", "v5e:4x4*2", "v5litepod-16")] == [1, 2, 1]


@pytest.mark.parametrize(
    ("mesh", "best"),
    [
        ((("tensor", 2), ("data", 16)), False),  # activations are summed between slices
        ((("data", 16), ("tensor", 2)), True),
    ],
)
def test_slices_are_slow_to_reach(mesh, best):
    """Of two meshes that send the same, the one is ranked first whose summed activations stay in a slice."""
    weight = ([4096, 16384], [4096, 8192], [[], ["tensor"]])
    parts = {"parameters": 1, "optimizer state": 2, "gradients": 1}
    row = {"parts": parts, "parameters": [weight], "model_flops": 6e15, "padding": 1.0}
    seconds = [
        guess(Candidate(topology, mesh, {}), row, CHIPS["v5e"], 1 << 40).seconds
        for topology in ("v5e:4x8", "v5e:4x4*2")
    ]
    assert (seconds[1] < 1.1 * seconds[0]) == best
