"""Builds the wheels of all packages of this repository, and of the example plugin, in one go.

``python tools/build_wheels.py`` puts them into ``dist/``. With ``--install`` they are then installed, with
what they need, into the environment of the interpreter that runs this: what tox tests them in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
EXTRAS: Final = {"xla_pjrt_acme": "[library]"}
"""What is installed beside a wheel: the PJRT library that stands for Acme's."""


def folders() -> list[Path]:
    """The distributions of this repository: packages by name, then the example."""
    projects = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return [project.parent for project in projects] + [ROOT / "examples" / "acme"]


def build(out: Path) -> list[Path]:
    """Build every wheel into ``out``, from clean sources; returns their paths.

    Raises subprocess.CalledProcessError when a build fails, RuntimeError when a wheel is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.whl"):
        old.unlink()
    _remove_leftovers()
    _pip("wheel", "--no-deps", "--wheel-dir", str(out), *map(str, folders()))
    _remove_leftovers()
    wheels = sorted(out.glob("*.whl"))
    if len(wheels) != len(folders()):
        names = ", ".join(wheel.name for wheel in wheels)
        raise RuntimeError(f"{len(folders())} packages gave {len(wheels)} wheels: {names}")
    return wheels


def install(wheels: Sequence[Path]) -> None:
    """Install the wheels, in the versions of constraints.txt for all else."""
    _pip(
        "install",
        "--no-compile",
        *(f"{wheel}{EXTRAS.get(wheel.name.split('-')[0], '')}" for wheel in wheels),
    )
    # a wheel of the version that is there already would stay out: what was built before would be tested
    _pip("install", "--no-compile", "--force-reinstall", "--no-deps", *map(str, wheels))


def _remove_leftovers() -> None:
    # setuptools would put modules into a wheel that were deleted since the last build
    for folder in folders():
        shutil.rmtree(folder / "build", ignore_errors=True)


def _pip(command: str, *arguments: str) -> None:
    # build backends come from the constraints too; newer pips read the second name for them
    pinned = {name: str(CONSTRAINTS) for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    pip = [sys.executable, "-m", "pip", command, "-q", "-c", str(CONSTRAINTS)]
    subprocess.run([*pip, *arguments], check=True, env=os.environ | pinned)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--install", action="store_true", help="install them into this environment")
    options = parser.parse_args()
    wheels = build(options.out)
    for wheel in wheels:
        print(wheel)
    if options.install:
        install(wheels)


if __name__ == "__main__":
    main()
