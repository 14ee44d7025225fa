"""Which ways to split a step's inputs are tried: arithmetic on shapes."""

from __future__ import annotations

from xla_core.contract.step_sharding import DATA, OTHER, PARAMETER, STATE, StepInput
from xla_plan.planning.search import layouts
from xla_plan.planning.splits import AXES, batch_of, part_of, splits

UP = StepInput("up.weight", PARAMETER, (4096, 1024), 4)
DOWN = StepInput("down.weight", PARAMETER, (1024, 4096), 4)
SQUARE = StepInput("out.weight", PARAMETER, (1024, 1024), 4)
BIAS = StepInput("up.bias", PARAMETER, (4096,), 4)
MOMENT = StepInput("exp_avg of up.weight", STATE, (4096, 1024), 4)
IDS = StepInput("ids", DATA, (16, 128), 8)
TARGETS = StepInput("targets", DATA, (16,), 8)
PLACES = StepInput("places", DATA, (128,), 8)
COUNT = StepInput("step", OTHER, (), 4)


def specs_of(inputs, mesh, rows=False):
    return next(s.specs for s in splits(inputs, [mesh]) if s.rows == rows)


def test_weights_that_widen_lie_by_outputs_and_those_that_narrow_by_inputs():
    mesh = (("fsdp", 2), ("tensor", 4))
    assert specs_of([UP, DOWN, MOMENT, IDS], mesh) == (
        ("tensor", "fsdp"), ("fsdp", "tensor"), ("tensor", "fsdp"), ("fsdp", None),
    )  # fmt: skip


def test_square_weights_are_tried_both_ways():
    mesh = (("tensor", 8),)
    inputs = [SQUARE, IDS]
    assert [s.specs for s in splits(inputs, [mesh])] == [
        (("tensor", None), None), ((None, "tensor"), None),
    ]  # fmt: skip
    assert len(list(splits([UP, IDS], [mesh]))) == 1


def test_data_lies_along_both_of_its_axes_and_what_is_small_is_whole():
    mesh = (("data", 2), ("fsdp", 4))
    assert specs_of([UP, BIAS, IDS, TARGETS, PLACES, COUNT], mesh) == (
        ("fsdp", None), (None,), (("data", "fsdp"), None), (("data", "fsdp"),), None, None,
    )  # fmt: skip


def test_meshes_that_the_batch_or_no_weight_divides_are_left_out():
    odd = StepInput("odd", PARAMETER, (1021, 1021), 4)
    meshes = list(layouts(8, AXES))
    assert {s.title for s in splits([odd, IDS], meshes)} == {"data=8"}
    three = StepInput("x", DATA, (6, 128), 4)
    assert {s.title for s in splits([UP, three], meshes)} == {
        "data=2,tensor=4", "fsdp=2,tensor=4", "tensor=8",
    }  # fmt: skip
    assert list(splits([odd, three], meshes)) == []


def test_what_the_user_annotated_is_left_alone():
    mine = StepInput("mine", PARAMETER, (4096, 1024), 4, annotated=True)
    assert specs_of([mine, UP, IDS], (("fsdp", 8),)) == (None, ("fsdp", None), ("fsdp", None))


def test_the_batch_is_the_most_frequent_first_dimension():
    assert batch_of([PLACES, IDS, TARGETS, UP]) == 16
    assert batch_of([UP]) == 0


def test_parts():
    sizes = {"data": 2, "fsdp": 4}
    assert part_of((16, 128), (("data", "fsdp"), None), sizes) == [2, 128]
    assert part_of((16, 128), None, sizes) == [16, 128]
