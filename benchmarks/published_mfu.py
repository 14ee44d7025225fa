"""Estimates of ``xla-plan`` beside MFU that was measured and published.

    python benchmarks/published_mfu.py [--row v6e-8b] [--json FILE] [--plans FILE ...]

The published figures are those of MaxText's README (https://github.com/AI-Hypercomputer/maxtext). What it does not
print beside them (sequences per chip, the mesh) is taken as its recipes for v6e have it, with all of a layer
computed again in the backward pass: an assumption, and named as such in the output. Those recipes keep the
inputs of 70 and 405 billion parameters' layers in the hosts' memory meanwhile; here they stay in HBM, and two
sequences of 8192 tokens per chip do not fit with 70 billion (libtpu: 39.9 of 31.25 GiB). ``--plans`` takes
plans that ``xla-plan run --json`` wrote before instead of compiling; they are matched by topology, mesh and
options. The shapes of v5p's models are those of MaxText's default model with
``global_parameter_scale`` 32 and 64; their sequences per chip (4 of 2048) are an assumption, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from plan_rows import report, tell
from xla_plan.planning.plans import Plan, plan
from xla_plan.steps.candidate import Candidate

STEP: Final = str(Path(__file__).resolve().parents[1] / "examples" / "pods" / "llama.py")


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure, and what stands for the run that it is of."""

    name: str
    published: float
    candidate: Candidate


def options(size: str, batch: int, chunks: int, length: int = 8192) -> dict[str, Any]:
    """Those of ``examples/pods/llama.py``."""
    return {"size": size, "length": length, "batch": batch, "loop": True, "loss_chunks": chunks}


ROWS: Final = (
    Row("v6e-8b", 0.455, Candidate("v6e:16x16", (("fsdp", 256),), options("8b", 3, 4))),
    Row("v6e-70b", 0.503, Candidate("v6e:16x16", (("fsdp", 256),), options("70b", 1, 4))),
    Row("v6e-405b", 0.386, Candidate(
        "v6e:16x16*2", (("data", 2), ("fsdp", 64), ("tensor", 4)), options("405b", 1, 4))),
    Row("v5p-32b", 0.7147, Candidate(
        "v5p:4x4x4", (("fsdp", 64),), options("maxtext-32b", 4, 1, length=2048))),
    Row("v5p-64b", 0.7031, Candidate(
        "v5p:4x4x4", (("fsdp", 64),), options("maxtext-64b", 4, 1, length=2048))),
)  # fmt: skip


def known_plans(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Plans from files, by what they are plans of."""
    found = {}
    for path in paths:
        for made in json.loads(path.read_text()):
            one = made["candidate"]
            mesh = tuple((name, size) for name, size in one["mesh"])
            found[Candidate(one["topology"], mesh, one["options"]).title] = made
    return found


def compared(row: Row, made: dict[str, Any]) -> dict[str, Any]:
    """The figures of one row; ``error`` is the estimate's, relative to what was published."""
    common = {"row": row.name, "assumed": row.candidate.title, "published_mfu": row.published}
    if made["error"]:
        return {**common, "refused": made["error"]}
    estimate = made["estimate"]
    return {
        **common,
        "estimated_mfu": estimate["mfu"],
        "bounds": [estimate["mfu_low"], estimate["mfu_high"]],
        "error": estimate["mfu"] / row.published - 1,
        "step_seconds": estimate["seconds"],
        "chip_bytes": made["memory"]["total"],
        "fits": made["fits"],
        "compile_seconds": made["figures"]["seconds"]["compile"],
        "host_peak_bytes": made["figures"]["host_peak_bytes"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--row", action="append", choices=[r.name for r in ROWS], help="only this; repeat"
    )
    parser.add_argument("--plans", type=Path, nargs="*", default=[])
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    known = known_plans(chosen.plans)

    def figures(row: Row) -> dict[str, Any]:
        made = known.get(row.candidate.title)
        if made is None:
            planned: Plan
            (planned,) = plan(
                f"{STEP}:training_step", [row.candidate], timeout=chosen.timeout, tell=tell
            )
            made = planned.as_json()
        return compared(row, made)

    wanted = [row for row in ROWS if not chosen.row or row.name in chosen.row]
    report(map(figures, wanted), chosen.json)


if __name__ == "__main__":
    main()
