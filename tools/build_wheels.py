"""Builds the wheels of all packages of this repository, and of the example plugin, in one go.

``python tools/build_wheels.py`` puts them into ``dist/``; with names, those of these folders only. What was
built can be installed, with what it needs, into the environment of the interpreter that runs this: tox builds
each wheel once and tests it where ``--install xla-core[test] xla-pjrt-cpu`` has put it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
EXTRAS: Final = {"acme": "[library]"}
"""What is installed beside a wheel where all are: the PJRT library that stands for Acme's."""


def folders() -> dict[str, Path]:
    """The distributions of this repository, by their folders' names: packages in order, then the example."""
    projects = [path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return {path.name: path for path in [*projects, ROOT / "examples" / "acme"]}


def wheel_of(folder: Path, out: Path) -> Path:
    """Where the wheel of a distribution lies among those in ``out``."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return out / f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"


def build(out: Path, names: Sequence[str] = ()) -> list[Path]:
    """Build the wheels of the folders ``names`` (default: all) into ``out``, from clean sources; their paths.

    Raises subprocess.CalledProcessError when a build fails, RuntimeError when a wheel is missing.
    """
    known = folders()
    chosen = {name: known[name] for name in names or known}
    wheels = [wheel_of(folder, out) for folder in chosen.values()]
    out.mkdir(parents=True, exist_ok=True)
    for old in wheels if names else out.glob("*.whl"):
        old.unlink(missing_ok=True)
    _remove_leftovers()
    _pip("wheel", "--no-deps", "--wheel-dir", str(out), *map(str, chosen.values()))
    _remove_leftovers()
    if missing := [wheel.name for wheel in wheels if not wheel.exists()]:
        raise RuntimeError(f"{len(chosen)} packages gave no {', '.join(missing)}")
    return wheels


def install(out: Path, wanted: Sequence[str] = ()) -> None:
    """Install wheels of ``out``, in the versions of constraints.txt for all else.

    ``wanted`` are names of folders, each with its extras in brackets (default: all, with ``EXTRAS``).
    """
    known = folders()
    wheels = {}
    for text in wanted or [name + EXTRAS.get(name, "") for name in known]:
        name, bracket, extras = text.partition("[")
        wheels[wheel_of(known[name], out)] = bracket + extras
    # first by themselves: a wheel of the version that is there already would stay out, and what was built
    # before would be tested
    _pip("install", "--no-compile", "--force-reinstall", "--no-deps", *map(str, wheels))
    _pip("install", "--no-compile", *(f"{wheel}{extras}" for wheel, extras in wheels.items()))


def _remove_leftovers() -> None:
    # setuptools would put modules into a wheel that were deleted since the last build
    for folder in folders().values():
        shutil.rmtree(folder / "build", ignore_errors=True)


def _pip(command: str, *arguments: str) -> None:
    # build backends come from the constraints too; newer pips read the second name for them
    pinned = {name: str(CONSTRAINTS) for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    pip = [sys.executable, "-m", "pip", command, "-q", "-c", str(CONSTRAINTS)]
    subprocess.run([*pip, *arguments], check=True, env=os.environ | pinned)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument(
        "--install", action="store_true", help="install wheels that are there; NAME may have extras"
    )
    options = parser.parse_args()
    if options.install:
        install(options.out, options.names)
        return
    for wheel in build(options.out, options.names):
        print(wheel)


if __name__ == "__main__":
    main()
