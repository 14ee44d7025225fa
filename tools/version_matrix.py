"""Runs the tests with the oldest and the newest versions that the packages allow; writes docs/versions.md.

``tox -e matrix`` calls it; what follows ``--`` goes on: names of combinations (``py313-torch215-jax012``;
default: all), then, after another ``--``, arguments for pytest. Every combination is a tox environment of
its own, ``matrix-NAME`` (see toxfile.py), a Python that is not installed being a row that says so.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENT: Final = ROOT / "docs" / "versions.md"
HEADING: Final = "## What was run"
COLUMNS: Final = "| Python | torch | jax | main job | tests |\n|---|---|---|---|---|\n"
ASKED: Final = "import platform, torch, jax; print(platform.python_version(), torch.__version__, jax.__version__)"
NO_PYTHON: Final = "not run: this Python is not installed"


@dataclass(frozen=True)
class Run:
    """What one combination gave: exact versions, the main job's accuracy, a line per package."""

    name: str
    versions: tuple[str, ...]
    main_job: str
    tests: tuple[str, ...]

    def row(self) -> str:
        """The combination's row of the table."""
        python, torch, jax = self.versions or (*self.name.split("-"),)
        return f"| {python} | {torch} | {jax} | {self.main_job} | {'; '.join(self.tests)} |\n"


def combinations() -> list[str]:
    """The factors in toxfile.py's ``MATRIX``, oldest first."""
    found = re.search(r"^MATRIX = \((.*?)^\)", (ROOT / "toxfile.py").read_text(), re.M | re.S)
    assert found is not None
    return re.findall(r'"([\w-]+)"', found.group(1))


def results_of(name: str, output: str, versions: tuple[str, ...]) -> Run:
    """What tox printed of environment ``matrix-name``, in short."""
    if "could not find python interpreter" in output or "skipped because could not find" in output:
        return Run(name, versions, NO_PYTHON, ())
    accuracy = re.findall(r"held[- ]out.*?([\d.]+ ?%)", output)
    packages = re.findall(r"packages/([\w-]+)/tests", output)
    totals = re.findall(r"^=+ (.*(?:passed|failed|error).*) in .*=+$", output, re.M)
    named = dict.fromkeys(packages)
    tests = tuple(f"{package}: {total}" for package, total in zip(named, totals, strict=False))
    return Run(name, versions, accuracy[-1] if accuracy else "failed", tests)


def run(name: str, arguments: Sequence[str]) -> Run:
    """Run one combination, showing what it prints, and sum it up."""
    tox = [sys.executable, "-m", "tox", "-e", f"matrix-{name}", "--", *arguments]
    process = subprocess.Popen(
        tox, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    process.wait()
    python = ROOT / ".tox" / f"matrix-{name}" / "bin" / "python"
    versions: tuple[str, ...] = ()
    if python.exists():
        asked = subprocess.run([python, "-c", ASKED], capture_output=True, text=True, check=False)
        versions = tuple(asked.stdout.split())
    return results_of(name, "".join(lines), versions)


def write(runs: Sequence[Run]) -> None:
    """Replace the table in docs/versions.md."""
    before, _, _ = DOCUMENT.read_text().partition(HEADING)
    table = COLUMNS + "".join(each.row() for each in runs)
    today = datetime.datetime.now(datetime.UTC).date()
    DOCUMENT.write_text(f"{before}{HEADING}\n\nBy `tox -e matrix` on {today}:\n\n{table}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the combinations that are asked for; 1 if a test of any failed or could not run."""
    parser = argparse.ArgumentParser(description="tests with the oldest and newest versions")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(combinations())}; default: all")
    given = list(sys.argv[1:] if argv is None else argv)
    own, _, rest = " ".join(given).partition(" -- ")
    names = parser.parse_args(own.split()).names or combinations()
    runs = [run(name, rest.split()) for name in names]
    write(runs)
    failed = [r for r in runs if not r.tests or re.search(r"failed|error", " ".join(r.tests))]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
