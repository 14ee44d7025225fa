"""``xla-plan search``: which mesh."""

from __future__ import annotations

from pathlib import Path

STEPS = Path(__file__).parents[1] / "small_steps.py"


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
