"""tox's view of ``packages/``: one environment per folder, found by listing, none named by hand.

The environment of a package holds that package (built as a wheel), its ``test`` extra, and what
those two declare; a sibling from this repository is installed only where it is declared.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.config.types import Command, EnvList
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv

ROOT = Path(__file__).resolve().parent
DEFAULT_ENVIRONMENTS = ("lint", "tests")
"""What a plain ``tox`` runs before the packages' own environments."""


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """Folders under ``packages/`` that are a distribution, by name."""
    projects = sorted(root.glob("packages/*/pyproject.toml"))
    return {project.parent.name: project.parent for project in projects}


def declared_names(folder: Path) -> tuple[set[str], bool]:
    """Distributions that ``folder`` and its ``test`` extra declare; whether it has that extra."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    requirements = [*project.get("dependencies", ()), *extras.get("test", ())]
    names = {re.split(r"[\s\[<>=!~;@(]", text.strip(), maxsplit=1)[0] for text in requirements}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}, "test" in extras


def install_targets(name: str, folders: dict[str, Path]) -> list[str]:
    """What pip installs to test package ``name``: siblings it declares, theirs, then itself."""
    needed: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in needed:
            needed.append(current)
            waiting.extend(sorted(declared_names(folders[current])[0] & folders.keys()))
    suffix = "[test]" if declared_names(folders[name])[1] else ""
    return [*(str(folders[sibling]) for sibling in needed[1:]), f"{folders[name]}{suffix}"]


def _installs(targets: Iterable[str]) -> MemoryLoader:
    # pip rebuilds a wheel from a local folder on every call, so a second run never tests old files.
    pip = ["python", "-I", "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    return MemoryLoader(commands_pre=[Command([*pip, *targets])])


@impl
def tox_extend_envs() -> Iterable[str]:
    """The environments' names: the folders' names."""
    return tuple(package_folders())


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Tell tox what runs by default and what to install where, before it reads any section."""
    folders = package_folders()
    core_conf.loaders.insert(0, MemoryLoader(env_list=EnvList([*DEFAULT_ENVIRONMENTS, *folders])))
    seeds = state.conf.memory_seed_loaders
    for name in folders:
        seeds[name].append(_installs(install_targets(name, folders)))


@impl
def tox_before_run_commands(tox_env: ToxEnv) -> None:
    """Drop what setuptools left from former builds: a wheel would have modules deleted since."""
    for folder in package_folders().values():
        shutil.rmtree(folder / "build", ignore_errors=True)
