"""What benchmarks of plans print: a row at a time, and all of them as a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def report(rows: Iterable[dict[str, Any]], path: Path | None) -> None:
    """Print each row as soon as it is there, and write all of them to ``path`` if there is one."""
    found = []
    for row in rows:
        found.append(row)
        print(json.dumps(row, indent=1), flush=True)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def tell(line: str) -> None:
    """Progress, beside the figures."""
    sys.stderr.write(f"{line}\n")
