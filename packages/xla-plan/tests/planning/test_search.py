"""``xla-plan search``: which mesh."""

from __future__ import annotations

from pathlib import Path

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
