"""What is computed from figures, without a compiler: estimates, depths, memory, advice, layouts."""

from __future__ import annotations

import copy

import pytest

from xla_plan.planning import depths, estimate, plans, search
from xla_plan.planning.chips import CHIPS
from xla_plan.steps.candidate import Candidate, parse_mesh, parse_option

FIGURES = {
    "program": "step_1",
    "devices": 4,
    "limit": 16 << 30,
    "memory": {
        "arguments": 4 << 30, "outputs": 4 << 30, "aliased": 4 << 30, "temporaries": 2 << 30, "code": 1 << 20,
    },
    "parts": {"parameters": 1 << 30, "optimizer state": 2 << 30, "gradients": 1 << 30, "buffers": 0, "count": 9},
    "work": {
        "flops": 197e12, "kernel_flops": 0.0, "kernel_bytes": 0.0, "cycles": 3e9, "hbm_bytes": 819e9,
        "unknown_loops": 0,
    },
    "collectives": [{"kind": "all-gather", "count": 4, "bytes": 8, "sent": 6.0, "lines": {"a.py:1": 6.0}}],
    "sent": {"ici": 0.0, "ici exposed": 0.0, "dcn": 0.0},
    "model_flops": 4 * 197e12,
    "seconds": {"all": 2.0, "compile": 1.0, "processor": 3.0},
    "from_cache": False,
    "host_peak_bytes": 1 << 30,
}  # fmt: skip


def changed(**parts):
    made = copy.deepcopy(FIGURES)
    for name, values in parts.items():
        made[name] = {**made[name], **values} if isinstance(values, dict) else values
    return made


def test_a_step_takes_what_the_compilers_cycles_take():
    found = estimate.estimate(FIGURES, CHIPS["v5e"])
    assert found.compute == pytest.approx(1) and found.hbm == pytest.approx(1)
    assert found.seconds == pytest.approx(2, rel=0.01)  # 3e9 cycles of 1.5 GHz
    assert found.low == pytest.approx(1) and found.high == pytest.approx(found.seconds)
    assert found.mfu == pytest.approx(0.5, rel=0.01) and found.mfu_high == pytest.approx(1)


def test_what_is_sent_beside_computation_is_free_until_it_takes_longer():
    beside = estimate.estimate(changed(sent={"ici": 100e9}), CHIPS["v5e"])
    assert beside.seconds == pytest.approx(2, rel=0.01) and beside.high > 2.9
    exposed = estimate.estimate(changed(sent={"ici": 100e9, "ici exposed": 100e9}), CHIPS["v5e"])
    assert exposed.seconds == pytest.approx(beside.seconds + beside.ici)
    long = estimate.estimate(changed(sent={"ici": 2000e9}), CHIPS["v5e"])
    assert long.seconds == pytest.approx(long.ici) and long.bound == "network"


def test_two_devices_of_a_chip_share_it():
    whole, half = (estimate.estimate(FIGURES, CHIPS[name]) for name in ("v6e", "v7x"))
    assert half.compute == pytest.approx(197 * 2 / 2307) and whole.compute == pytest.approx(
        197 / 918
    )


def test_memory_by_kind_adds_up_to_what_the_compiler_says():
    memory = plans.memory_by_kind(FIGURES)
    assert memory["inputs and padding"] == 1 << 30 and memory["activations"] == 1 << 30
    assert memory["total"] == (6 << 30) + (1 << 20)


def test_a_plan_that_does_not_fit_says_what_to_change():
    figures = changed(memory={"temporaries": 14 << 30})
    plan = plans.plan_of(Candidate("v5e:2x2", (("fsdp", 4),)), figures)
    assert not plan.fits and "temporaries: fewer sequences" in plan.advice[0]
    figures = changed(parts={"optimizer state": 12 << 30}, memory={"arguments": 15 << 30})
    plan = plans.plan_of(Candidate("v5e:2x2", (("fsdp", 4),)), figures)
    assert not plan.fits and "optimizer state: split it" in plan.advice[0]
    assert plans.plan_of(Candidate("v5e:2x2"), FIGURES).fits


@pytest.mark.parametrize(
    "text",
    [
        "Ran out of memory on HBM, the total memory required for HLO temporaries (16.5G) exceeds available "
        "HBM (15.75G).",
        "Ran out of memory in memory space hbm. Used 16.5G of 15.75G hbm. Exceeded by 768M.",
    ],
)
def test_what_the_compiler_says_of_too_much(text):
    plan = plans.plan_of(Candidate("v5e:2x2"), {"error": f"OutOfMemoryError: {text}"})
    assert not plan.fits and plan.memory["total"] == int(16.5 * 2**30)
    assert plan.limit == int(15.75 * 2**30) and "0.8 GiB too much" in plan.advice[0]


def test_figures_are_extended_by_what_a_layer_adds():
    depth = depths.parse_depth("layers=2,4,10")
    larger = changed(
        work={"flops": 297e12, "cycles": 4e9}, parts={"count": 11}, memory={"temporaries": 3 << 30}
    )
    larger["collectives"] = [
        {"kind": "all-gather", "count": 6, "bytes": 12, "sent": 9.0, "lines": {"a.py:1": 9.0}},
        {"kind": "all-reduce", "count": 2, "bytes": 2, "sent": 2.0, "lines": {}},
    ]
    found = depth.extend([FIGURES, larger])
    assert found["work"]["flops"] == pytest.approx(597e12) and found["work"]["cycles"] == 7e9
    assert found["memory"]["temporaries"] == 6 << 30 and found["parts"]["count"] == 17
    assert [(r["kind"], r["count"]) for r in found["collectives"]] == [
        ("all-gather", 12),
        ("all-reduce", 8),
    ]
    assert found["collectives"][0]["lines"] == {"a.py:1": 18.0}
    assert (found["devices"], found["limit"], found["program"]) == (4, 16 << 30, "step_1")


@pytest.mark.parametrize(
    "text",
    ["layers=2,4", "layers=2,2,8", "layers=2,02,8", "layers=2,4,x,8", "2,4,8", "layers=a,b,c"],
)
def test_depths_that_are_none(text):
    with pytest.raises(ValueError, match="layers=4,8,32"):
        depths.parse_depth(text)


def test_all_layouts_of_chips_along_axes():
    found = list(search.layouts(4, ("fsdp", "tensor")))
    assert found == [(("tensor", 4),), (("fsdp", 2), ("tensor", 2)), (("fsdp", 4),)]
    assert len(list(search.layouts(64, ("data", "fsdp", "tensor")))) == 28
    assert list(search.layouts(1, ("fsdp",))) == [()]


@pytest.mark.parametrize(
    ("topology", "count"),
    [("v5e:4x4", 16), ("v6e:16x16*2", 512), ("v5litepod-16", 16), ("v4-8", 4), ("v5p:2x2x4", 16)],
)
def test_chips_of_a_topology(topology, count):
    assert search.devices_of(topology) == count


def test_meshes_and_options_as_text():
    assert parse_mesh("data=2,fsdp=8") == (("data", 2), ("fsdp", 8))
    assert [parse_option(t) for t in ("batch=2", "size=8b", "loop=True")] == [
        ("batch", 2), ("size", "8b"), ("loop", True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="fsdp=16 or data=2"):
        parse_mesh("fsdp:4")
