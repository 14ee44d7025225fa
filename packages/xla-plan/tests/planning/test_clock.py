"""The table of chips against the compiler's own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from xla_plan.planning.chips import CHIPS, chip_of

STEPS = Path(__file__).parents[1] / "small_steps.py"
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "v7x:2x2x1",
}


@pytest.fixture(scope="module")
def plans(command, once):
    """The plan of one large product on each generation."""
    chosen = [a for t in TOPOLOGIES.values() for a in ("--topology", t)]
    step = "run", f"{STEPS}:product", "--mesh", "none", "--set", "size=8192"
    done = once("product", lambda: command(*step, *chosen))
    assert done.returncode == 0, done.stderr
    return dict(zip(TOPOLOGIES, done.plans, strict=True))


@pytest.mark.parametrize("name", CHIPS)
def test_cycles_become_the_seconds_of_a_large_product(plans, name):
    plan, chip = plans[name], CHIPS[name]
    assert plan["figures"]["work"]["flops"] == 2 * 8192**3
    alone = plan["figures"]["work"]["flops"] * chip.devices / chip.flops
    # libtpu gives a large product 88 to 91 % of the matrix units' rate
    assert 0.86 < alone / plan["estimate"]["cycles"] < 0.94


@pytest.mark.parametrize("name", CHIPS)
def test_a_devices_memory_is_what_the_chip_has_but_for_what_the_system_keeps(plans, name):
    chip = CHIPS[name]
    assert 0.97 < plans[name]["limit"] * chip.devices / chip.hbm_bytes < 1.01


def test_names_of_topologies():
    assert chip_of("v5litepod-16").name == "v5e" and chip_of("v6e:16x16*2").name == "v6e"
    assert chip_of("v4-8").name == "v4"
    with pytest.raises(ValueError, match="no figures for 'v2:2x2'"):
        chip_of("v2:2x2")
