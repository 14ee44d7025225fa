"""A step's repeats as loops, and one by one: memory, cycles and compile time of the same steps, both ways.

    python benchmarks/plan_loops.py [--row NAME] [--json FILE]

Each row is a training step of 8 billion parameters' shape (``examples/pods/llama.py``), whose layers have
parameters of their own. It is planned with ``XLA_LOOP_REPEATS=0`` and ``1``, which makes loops where they do
not pay, too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final

from plan_rows import report, tell
from xla_plan.planning.plans import plan
from xla_plan.steps.candidate import Candidate

STEP: Final = str(Path(__file__).resolve().parents[1] / "examples" / "pods" / "llama.py")
CHOICE: Final = "XLA_LOOP_REPEATS"
Mesh = tuple[tuple[str, int], ...]


def step(topology: str, mesh: Mesh, layers: int = 8, **options: Any) -> Candidate:
    """The candidate of a row."""
    return Candidate(topology, mesh, {"size": "8b", "loop": False, "layers": layers, **options})


GATHERED: Final = (("fsdp", 16),)
ROWS: Final = {
    **{f"{n} layers": step("v5e:4x4", GATHERED, n) for n in (2, 4, 8, 16, 32)},
    "256 tokens": step("v5e:4x4", GATHERED, length=256),
    "nothing again": step("v5e:4x4", GATHERED, remat=False),
    "from eight": step("v6e:2x4", (("fsdp", 8),), batch=2),
    "from eight, and split": step("v5e:4x8", (("fsdp", 8), ("tensor", 4)), batch=4),
    "from four": step("v5e:4x4", (("fsdp", 4), ("tensor", 4)), batch=4),
    "tensor parallel": step("v5e:4x4", (("tensor", 16),), sequences=4),
    "data parallel": step("v5p:2x2x1", (("data", 4),)),
}


def planned(candidate: Candidate, choice: str) -> dict[str, Any]:
    """The figures of one step with repeats lowered as ``choice`` says."""
    os.environ[CHOICE] = choice
    (made,) = plan(f"{STEP}:training_step", [candidate], tell=tell)
    found = made.as_json()
    if found["error"]:
        return {"refused": found["error"]}
    figures = found["figures"]
    return {
        "chip_bytes": found["memory"]["total"],
        "cycles": figures["work"]["cycles"],
        "sent_bytes": figures["sent"]["ici"],
        "compile_seconds": figures["seconds"]["compile"],
        "host_peak_bytes": figures["host_peak_bytes"],
    }


def both(name: str) -> dict[str, Any]:
    """The figures of one row, both ways."""
    ways = {how: planned(ROWS[name], c) for how, c in (("one by one", "0"), ("loops", "1"))}
    return {"row": name, "step": ROWS[name].title, **ways}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--row", action="append", choices=list(ROWS), help="only this; repeat")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    report(map(both, chosen.row or ROWS), chosen.json)


if __name__ == "__main__":
    main()
