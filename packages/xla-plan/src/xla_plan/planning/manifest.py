"""The manifest of a cache: the step, the topology and the versions that each program belongs to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from xla_plan.planning.plans import Plan

NAME: Final = "xla-plan.json"
"""The manifest's name in the cache's folder."""
_VERSIONED: Final = ("xla-core", "xla-spmd", "xla-pjrt-tpu", "torch", "jax", "jaxlib", "libtpu")


def write(cache: Path, step: str, plans: Sequence[Plan]) -> Path:
    """Add the plans that were compiled as a whole to the manifest of a cache, and return the manifest's path.

    ``step`` is the step function, or the script with its arguments.
    """
    path = cache / NAME
    present: list[dict[str, object]] = read(cache) if path.is_file() else []
    added = [_row(step, p) for p in plans if not p.error and not p.scaled]
    replaced = {row["program"] for row in added}
    rows = [row for row in present if row["program"] not in replaced] + added
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    return path


def read(cache: Path) -> list[dict[str, object]]:
    """The rows of a cache's manifest. Raises FileNotFoundError if there is none."""
    rows: list[dict[str, object]] = json.loads((cache / NAME).read_text())
    return rows


def _row(step: str, plan: Plan) -> dict[str, object]:
    return {
        "program": plan.figures["program"],
        "step": step,
        "topology": plan.candidate.topology,
        "mesh": plan.candidate.mesh_text,
        "options": dict(plan.candidate.options),
        "versions": {name: _version(name) for name in _VERSIONED},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
