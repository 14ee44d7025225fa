"""Generations, accelerator types and topologies by name; nothing is compiled."""

from __future__ import annotations

import pytest

from xla_pjrt_tpu.hardware import GENERATIONS, generation, parse_accelerator_type
from xla_pjrt_tpu.topology import parse_topology


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e", "v5e"), ("v5litepod", "v5e"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"), ("TPU7x", "v7x"), ("tpu7x", "v7x"), (" V4 ", "v4"),
    ],
)  # fmt: skip
def test_generations_have_several_names(name, expected):
    assert generation(name).name == expected


def test_unknown_generation_lists_the_known():
    with pytest.raises(
        ValueError, match=f"'v9' is not a TPU generation; .*{', '.join(GENERATIONS)}"
    ):
        generation("v9")


@pytest.mark.parametrize(
    ("text", "name", "shape"),
    [
        ("v5litepod-16", "v5e", (4, 4)), ("v5e-256", "v5e", (16, 16)), ("v6e-1", "v6e", (1, 1)),
        ("v4-8", "v4", (2, 2, 1)), ("v5p-16", "v5p", (2, 2, 2)), ("v3-8", "v3", (2, 2)),
    ],
)  # fmt: skip
def test_accelerator_types(text, name, shape):
    found, chips = parse_accelerator_type(text)
    assert (found.name, chips) == (name, shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5e", "not an accelerator type"),
        ("v5e-x", "not an accelerator type"),
        ("v5e-7", "sizes: 1, 4, 8"),
    ],
)
def test_wrong_accelerator_types(text, words):
    with pytest.raises(ValueError, match=words):
        parse_accelerator_type(text)


def test_topologies():
    found = parse_topology("v6e:16x16*2", {})
    assert (found.name, found.slices, found.chip_config) == ("v6e:16x16", 2, None)
    assert found.library_options() == {"chips_per_host_bounds": [2, 2, 1], "num_slices": 2}
    assert parse_topology("v5e:1x1", {}).library_options() == {"chips_per_host_bounds": [1, 1, 1]}
    assert parse_topology("v7x:2x2x1", {}).library_name == "tpu7x:2x2x1"
    assert parse_topology("v5litepod-16", {}).name == "v5e:4x4"


def test_megacore_is_v4s_default_and_can_be_switched_off():
    whole, split = (parse_topology("v4:2x2x1", o) for o in ({}, {"TPU_MEGACORE": "default"}))
    assert whole.library_options()["chip_config_name"] == "megacore_dense"
    assert split.library_options()["chip_config_name"] == "default"
    assert split.memory_bytes == whole.memory_bytes // 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5e", "accelerator type"),
        ("v9:2x2", "not a TPU generation"),
        ("v4:2x2", "three dimensions"),
        ("v5e:0x4", "a dimension is 0"),
        ("v5e:4x4*x", "not a number of slices"),
        ("v5e:4x4*0", "not a number of slices"),
        ("nonsense", "accelerator type"),
    ],
)
def test_wrong_topologies_say_what_is_accepted(text, words):
    with pytest.raises(ValueError, match=rf"(?s)XLA_AOT_TOPOLOGY=.*{words}.*v5e:4x4"):
        parse_topology(text, {})
