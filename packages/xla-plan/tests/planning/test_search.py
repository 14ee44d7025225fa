"""``xla-plan search``: which mesh."""

from __future__ import annotations

from pathlib import Path

from xla_plan.planning.plans import Plan
from xla_plan.planning.search import Guess, compile_best
from xla_plan.steps.candidate import Candidate

STEPS = Path(__file__).parents[1] / "small_steps.py"
LLAMA = Path(__file__).resolve().parents[4] / "examples" / "pods" / "llama.py"


def test_meshes_are_ranked_and_the_best_compiled(command):
    done = command(
        "search", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--axes", "fsdp,rest", "--compile", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "3 meshes of 4 devices along fsdp, rest" in done.stderr
    assert done.stderr.count(": compiled (") == 2
    times = [plan["estimate"]["seconds"] for plan in done.plans]
    assert times == sorted(times)
    # the step function refuses a mesh without the axis that it splits over
    assert "rest=4: PartitionSpecError" in done.stderr


def test_what_cannot_fit_is_not_compiled(command):
    done = command(
        "search", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--axes", "fsdp", "--set", "width=65536"
    )
    assert done.returncode == 2 and "compiling" not in done.stderr
    assert "parameters, their state and gradients alone are 152% of HBM" in done.stderr


def test_of_meshes_that_take_the_same_time_the_one_with_more_room_is_compiled(command):
    """Copies along ``data`` send what parts along twice the ``fsdp`` send, and hold twice as much."""
    done = command(
        "search", f"{LLAMA}:training_step", "--topology", "v5e:2x2", "--axes", "data,fsdp",
        "--set", "size=tiny", "--set", "length=128", "--set", "sequences=4", "--compile", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranked = [line.split(":")[1].strip() for line in done.stderr.splitlines() if "GiB held" in line]
    assert ranked.index("fsdp=4") < ranked.index("data=2,fsdp=2")
    assert [plan["candidate"]["mesh"] for plan in done.plans] == [[["fsdp", 4]]]


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
    assert [plan.fits for plan in made] == [False, True, True]
    # the second one splits activations as the first one does, and holds more
    assert tried == [meshes[0][0], meshes[2][0], meshes[3][0]]


def test_no_more_than_three_times_as_many_are_compiled():
    guesses = [Guess(Candidate("v6e:16x16", (("tensor", n),), {}), 1, 1.0) for n in range(2, 20)]
    made = compile_best(guesses, 2, lambda c: Plan(c, {}, {"total": 40}, 31, None, ()))
    assert len(made) == 6
