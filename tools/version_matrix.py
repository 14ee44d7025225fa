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
"""What stands from here to the next heading of docs/versions.md is written anew."""
COLUMNS: Final = "| Python | torch | jax | main job | tests |\n|---|---|---|---|---|\n"
ASKED: Final = "import platform, torch, jax; print(platform.python_version(), torch.__version__, jax.__version__)"
NO_PYTHON: Final = "not run: this Python is not installed"
NOT_ENDED: Final = "error: did not end"


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
    # tox prints each command before it runs: a run that ended without totals must not get the next one's
    _, *sections = re.split(r"^matrix-.*commands\[\d+\]> (.*)$", output, flags=re.M)
    tests = []
    for command, printed in zip(sections[::2], sections[1::2], strict=True):
        package = re.search(r"packages/([\w-]+)/tests", command)
        totals = re.findall(
            r"^=+ (.*(?:passed|failed|error|no tests ran).*) in .*=+$", printed, re.M
        )
        if package is not None:
            tests.append(f"{package[1]}: {totals[-1] if totals else NOT_ENDED}")
    return Run(name, versions, accuracy[-1] if accuracy else "failed", tuple(tests))


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
    """Replace the table in docs/versions.md; the sections before and after it stay."""
    before, _, replaced = DOCUMENT.read_text().partition(HEADING)
    _, heading, after = replaced.partition("\n## ")
    table = COLUMNS + "".join(each.row() for each in runs)
    today = datetime.datetime.now(datetime.UTC).date()
    text = f"{before}{HEADING}\n\nBy `tox -e matrix` on {today}:\n\n{table}"
    DOCUMENT.write_text(f"{text}{heading}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the combinations that are asked for; 1 if a test of any failed or could not run."""
    parser = argparse.ArgumentParser(description="tests with the oldest and newest versions")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(combinations())}; default: all")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    names = parser.parse_args(given[:end]).names or combinations()
    runs = [run(name, given[end + 1 :]) for name in names]
    write(runs)
    failed = [r for r in runs if not r.tests or re.search(r"failed|error", " ".join(r.tests))]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
