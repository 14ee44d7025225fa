"""``xla-plan search``: which mesh."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from xla_plan.planning import plans
from xla_plan.planning.chips import CHIPS
from xla_plan.planning.plans import Plan
from xla_plan.planning.search import Guess, compile_best, guess
from xla_plan.steps.candidate import Candidate

STEPS = Path(__file__).parents[1] / "small_steps.py"
LLAMA = Path(__file__).resolve().parents[4] / "examples" / "pods" / "llama.py"


def test_meshes_are_ranked_and_the_best_compiled(command):
    done = command(
        "search", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--axes", "fsdp,rest", "--compile", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "3 meshes of 4 devices along fsdp, rest" in done.stderr
    assert done.stderr.count(": compiled (") == 2  # fsdp=4, and fsdp=2 with the other axis
    times = [plan["estimate"]["seconds"] for plan in done.plans]
    assert times == sorted(times)
    # the step function refuses a mesh without the axis that it splits over
    assert "rest=4: PartitionSpecError" in done.stderr


def test_plans_with_other_options_are_ranked_together(command):
    done = command(
        "search", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--axes", "fsdp", "--set", "rows=64|2048",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [plan["candidate"]["options"] for plan in done.plans] == [{"rows": 2048}, {"rows": 64}]
    times = [plan["estimate"]["seconds"] / plan["figures"]["model_flops"] for plan in done.plans]
    assert times == sorted(times)


def test_what_cannot_fit_is_not_compiled(command):
    done = command(
        "search", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--axes", "fsdp", "--set", "width=65536"
    )
    assert done.returncode == 2 and "compiling" not in done.stderr
    assert "parameters, their state and gradients alone are 152% of HBM" in done.stderr


@pytest.mark.long
def test_of_meshes_that_take_the_same_time_the_one_with_more_room_is_compiled(command):
    """Copies along ``data`` send what parts along twice the ``fsdp`` send, and hold twice as much."""
    done = command(
        "search", f"{LLAMA}:training_step", "--topology", "v5e:2x2", "--axes", "data,fsdp",
        "--set", "size=tiny", "--set", "layers=1", "--set", "length=128", "--set", "sequences=4", "--compile", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranked = [line.split(":")[1].strip() for line in done.stderr.splitlines() if "GiB held" in line]
    assert ranked.index("fsdp=4") < ranked.index("data=2,fsdp=2")
    compiled = [line.split()[3] for line in done.stderr.splitlines() if ": compiling" in line]
    assert compiled == ["fsdp=4", "data=2,fsdp=2", "data=4"]


def test_meshes_are_compiled_until_enough_fit():
    """The case of 70 billion parameters on 256 chips of v6e: the best by arithmetic do not fit."""
    meshes = [
        ((("fsdp", 128), ("tensor", 2)), 3, 40),
        ((("data", 2), ("fsdp", 64), ("tensor", 2)), 6, 43),
        ((("fsdp", 256),), 3, 23),
        ((("fsdp", 32), ("tensor", 8)), 3, 20),
        ((("data", 2), ("fsdp", 128)), 6, 26),
        ((("data", 4), ("fsdp", 64)), 12, 30),
    ]
    needed = {mesh: gigabytes for mesh, _, gigabytes in meshes}
    tried = []

    def compile_one(candidate):
        tried.append(candidate.mesh)
        return Plan(candidate, {}, {"total": needed[candidate.mesh]}, 31, None, ())

    guesses = [Guess(Candidate("v6e:16x16", mesh, {}), held, 1.0) for mesh, held, _ in meshes]
    made = compile_best(guesses, 2, compile_one)
    assert [plan.fits for plan in made] == [False, True, True, True, True]
    # the second one splits activations as the first one does, and holds more
    assert tried == [meshes[0][0], *(mesh for mesh, _, _ in meshes[2:])]


def test_meshes_of_other_kinds_are_compiled_before_more_of_the_first():
    """The case of eight experts: splits of products that the arithmetic likes turn out slower."""
    kinds = [(("tensor", 2),), (), (("tensor", 4),), (("tensor", 8),)]
    meshes = [(("fsdp", n), *kind) for kind in kinds for n in (8, 4, 2)]
    tried = []

    def compile_one(candidate):
        tried.append(candidate.mesh)
        seconds = {1: 2.0, 2: 3.0, 4: 4.0}[dict(candidate.mesh).get("tensor", 1)]
        return Plan(candidate, {}, {"total": 20}, 31, SimpleNamespace(seconds=seconds), ())

    made = compile_best(
        [Guess(Candidate("v5p:2x2x1", mesh, {}), 1, 1.0) for mesh in meshes], 3, compile_one
    )
    # two of each kind, and one more of the best
    assert tried == [meshes[number] for number in (0, 3, 6, 1, 4, 7, 5)]
    assert len(made) == 7


def test_no_more_than_three_times_as_many_are_compiled():
    guesses = [Guess(Candidate("v6e:16x16", (("tensor", n),), {}), 1, 1.0) for n in range(2, 20)]
    made = compile_best(guesses, 2, lambda c: Plan(c, {}, {"total": 40}, 31, None, ()))
    assert len(made) == 6


CHIP = CHIPS["v5p"]
FLOPS = 6e15


def seconds_sent(mesh, *parameters, padding=1.0, options=None):
    """The seconds that a chip sends, of a step with these parameters (whole, part, axes of each dimension)."""
    parts = {"parameters": 1, "optimizer state": 2, "gradients": 1}
    row = {"parts": parts, "parameters": parameters, "model_flops": FLOPS, "padding": padding}
    made = guess(Candidate("v5p:2x2x1", mesh, options or {}), row, CHIP, 1 << 40)
    devices = math.prod(size for _, size in mesh)
    return made.seconds * FLOPS - padding * FLOPS / devices / CHIP.flops


def test_tokens_are_sent_to_experts_whose_weights_stay():
    """Two visits of eight experts: a token is multiplied with a quarter of the weights."""
    experts = ([8, 64, 32], [2, 64, 32], [["expert"], [], []])
    tokens = FLOPS / 6 / (8 * 64 * 32 / 4) / 4
    bytes_sent = 4 / 3 * (2 * 2 * tokens * 32) * 3 / 4
    assert seconds_sent((("expert", 4),), experts) == pytest.approx(bytes_sent / CHIP.ici)
    # other weights are split over the same axis, and gathered as over fsdp: twice, and their gradients
    dense = ([64, 32], [64, 8], [[], ["expert"]])
    split = ([64, 32], [64, 8], [[], ["fsdp"]])
    of_dense = seconds_sent((("expert", 4),), dense)
    assert of_dense == pytest.approx(seconds_sent((("fsdp", 4),), split))
    assert of_dense == pytest.approx((2 * 2 + 4) * 64 * 32 * 3 / 4 / CHIP.ici, rel=1e-3)


def test_positions_that_are_split_are_exchanged_for_heads():
    weight = ([64, 32], [64, 8], [[], ["sequence"]])
    without = seconds_sent((("fsdp", 4),), ([64, 32], [64, 8], [[], ["fsdp"]]))
    exchanged = 2 * (FLOPS / 6 / (64 * 32) / 4) * 32 * 3 / 4
    found = seconds_sent((("sequence", 4),), weight)
    assert found == pytest.approx(without + exchanged / CHIP.ici)


def test_stages_wait_at_the_ends_of_a_step_and_gather_in_each_iteration():
    weight = ([4, 64, 32], [1, 64, 16], [["stage"], [], ["fsdp"]])
    mesh = (("stage", 4), ("fsdp", 2))
    gathered = (
        (2 * 2 * 11 + 4) * 64 * 32 / 2
    )  # eight microbatches, and three iterations to fill and empty
    waited = (11 / 8 - 1) * FLOPS / 8 / CHIP.flops
    found = seconds_sent(mesh, weight, options={"microbatches": 8})
    assert found == pytest.approx(waited + gathered / CHIP.ici)
    assert seconds_sent(mesh, weight) == math.inf


def test_copies_are_summed_along_every_axis_that_splits_tokens():
    norm = ([4096], [4096], [[]])
    for axis in ("data", "fsdp", "sequence", "expert"):
        sent = 2 * 4 * 4096 * 3 / 4
        assert seconds_sent(((axis, 4),), norm) == pytest.approx(sent / CHIP.ici, rel=1e-2)


def test_experts_that_do_not_divide_are_computed_on_padding():
    """Eight experts over sixteen chips: half of the chips have none."""
    uneven = ([8, 64, 32], [1, 64, 32], [["expert"], [], []])
    even = ([8, 64, 32], [1, 64, 32], [["expert"], [], []])
    half = FLOPS / 16 / CHIP.flops
    by_sixteen = seconds_sent((("expert", 16),), uneven) - half
    sent = 4 / 3 * 2 * 2 * (FLOPS / 6 / (8 * 64 * 32 / 4) / 16) * 32 * 15 / 16 / CHIP.ici
    assert by_sixteen == pytest.approx(sent)
    by_eight = seconds_sent((("expert", 8),), even)
    assert by_eight == pytest.approx(sent * 2 * (7 / 8) / (15 / 16))


def test_a_batch_that_does_not_divide_counts_as_its_parts_do(command):
    """Two sequences over four chips: half of them would compute on padding."""
    del command  # it skips the test where libtpu is not installed
    request = {
        "step": f"{LLAMA}:training_step",
        "topology": "v5e:2x2",
        "options": {"size": "tiny", "length": 128, "sequences": 2},
        "meshes": [[["fsdp", 4]], [["fsdp", 2], ["sequence", 2]]],
    }
    padded, whole = plans.ask_worker(request, None, None)["rows"]
    assert (padded["padding"], whole["padding"]) == (2.0, 1.0)
    tokens = next(row for row in whole["parameters"] if row[0] == [1024, 256])
    assert tokens[1:] == [[1024, 64], [[], ["fsdp", "sequence"]]]
    again = seconds_sent((("fsdp", 4),), padding=2.0)
    assert again == pytest.approx(0.0, abs=1e-9)
