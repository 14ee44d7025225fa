"""The process that measures one candidate: ``python -m xla_plan.worker REQUEST RESULT`` (two files of JSON)."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from xla_plan.candidate import Candidate
from xla_plan.measure import measure


def main(request: str, result: str) -> int:
    """Read what to measure, and write the figures, or what went wrong."""
    wanted: dict[str, Any] = json.loads(Path(request).read_text())
    candidate = Candidate(
        wanted["topology"], tuple((n, s) for n, s in wanted["mesh"]), wanted["options"]
    )
    try:
        found = measure(wanted["step"], candidate, wanted.get("arguments", ()))
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(found))
    return int("error" in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
