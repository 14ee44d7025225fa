"""tox's view of ``packages/``: one environment per folder, found by listing, none named by hand.

The environment of a package holds that package (built as a wheel), its ``test`` extra, and what
those two declare; a sibling from this repository is installed only where it is declared. Two things are made
once for all environments: the wheels, and a folder with what runs the tests and what xla-core needs from elsewhere
(torch and jax, half a gigabyte): every package requires xla-core, so none sees more in it than it declares.

``PACKAGE-py312-torch215-jax011`` is the same environment with another Python, torch or jax: each of the
three factors may be left out. Without torch and jax factors an environment has the versions of
``constraints.txt``; with one of them, pip chooses what torch and jax bring along.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import hashlib
import re
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock
from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.config.types import Command, EnvList
from tox.execute.request import StdinSource
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv
from tox.tox_env.errors import Fail

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
DEFAULT_ENVIRONMENTS = ("lint", "docs", "tests")
"""What a plain ``tox`` runs before the packages' own environments."""

WITH_ALL_WHEELS = ("tests", "sweep")
"""Environments with the wheels of all packages, and of the example plugin."""

PIP_INSTALL = ["-I", "-m", "pip", "install", "-q", "--no-compile", "-c", str(CONSTRAINTS)]
SHARED = ROOT / ".tox" / ".shared"
WHEELS = ["python", str(ROOT / "tools/build_wheels.py"), "--out", str(ROOT / ".tox/.wheels")]
"""The command that builds wheels, and with ``--install`` installs them."""

MATRIX = (
    "py311-torch211-jax010",
    "py311-torch214-jax010",
    "py311-torch215-jax010",
    "py312-torch213-jax010",
    "py312-torch213-jax012",
    "py312-torch215-jax011",
    "py312-torch215-jax012",
    "py313-torch215-jax010",
    "py313-torch215-jax011",
    "py313-torch215-jax012",
)
"""What ``tox -e matrix`` runs: the oldest versions that the packages allow first, the newest last."""

VARIED_SECTIONS = ("# What the packages stand on.", "# What torch brings along.")
"""Headings in constraints.txt: below them stands what an environment of the matrix chooses itself."""


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """Folders under ``packages/`` that are a distribution, by name."""
    projects = sorted(root.glob("packages/*/pyproject.toml"))
    return {project.parent.name: project.parent for project in projects}


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


def declared_names(folder: Path) -> tuple[set[str], bool]:
    """Distributions that ``folder`` and its ``test`` extra declare; whether it has that extra."""
    project = _project(folder)
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


def _installs(targets: Iterable[str], constraints: Path = CONSTRAINTS) -> Command:
    # pip rebuilds a wheel from a local folder on every call, so a second run never tests old files.
    return Command(["python", *PIP_INSTALL[:-1], str(constraints), *targets])


def install_names(name: str, folders: dict[str, Path]) -> list[str]:
    """As ``install_targets``, by the folders' names; for an environment of several packages, all wheels."""
    targets = install_targets(name, folders) if name in folders else ()
    return [Path(target).name for target in targets]


def factor_pins(factors: str) -> list[str]:
    """Requirements that factors stand for: ``torch215`` is ``torch==2.15.*``, ``jax010`` jax 0.10."""
    pins = []
    for name, major, minor in re.findall(r"(?:^|-)(torch|jax)(\d)(\d+)(?=-|$)", factors):
        names = ("jax", "jaxlib") if name == "jax" else (name,)
        pins += [f"{each}=={int(major)}.{int(minor)}.*" for each in names]
    return pins


def factor_constraints(factors: str) -> str:
    """The text of constraints.txt for an environment with these factors."""
    text = CONSTRAINTS.read_text()
    pins = factor_pins(factors)
    if not pins:
        return text
    sections = re.split(r"\n\n(?=# )", text)
    kept = [section for section in sections if not section.startswith(VARIED_SECTIONS)]
    return "\n\n".join([*kept, "# The factors.\n" + "\n".join(pins)]) + "\n"


def matrix_environments() -> dict[str, tuple[list[str], str]]:
    """Names of environments with factors, each with the packages whose tests it runs and its factors.

    ``matrix-FACTORS`` runs those of all packages in one environment: a torch for each would take tens of
    gigabytes.
    """
    packages = list(package_folders())
    whole = {f"matrix-{factors}": (packages, factors) for factors in MATRIX}
    return whole | {
        f"{name}-{factors}": ([name], factors) for name in packages for factors in MATRIX
    }


def _varied(
    packages: list[str], factors: str, work: Path, arguments: Iterable[str]
) -> MemoryLoader:
    """An environment with other versions than those of constraints.txt.

    What is loaded from memory is not searched for tox's ``{...}``: all is written out, ``arguments``
    being those that tox was given for pytest.
    """
    work.mkdir(parents=True, exist_ok=True)
    constraints = work / f"constraints-{factors}.txt"
    constraints.write_text(factor_constraints(factors))
    folders = package_folders()
    targets = {target: None for name in packages for target in install_targets(name, folders)}
    whole = len(packages) > 1
    example = ["-r", str(ROOT / "examples" / "requirements.txt")] if whole else []
    main_job = [Command(["python", str(ROOT / "examples" / "train_digits.py")])] if whole else []
    pytest = ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal"]
    # one process per package: xla-spmd's tests show all devices as one, the others do not
    tests = [Command([*pytest, str(folders[name] / "tests"), *arguments]) for name in packages]
    return MemoryLoader(
        description=f"tests of {', '.join(packages)} with {factors}",
        install_command=Command(
            [
                *("python", "-I", "-m", "pip", "install", "--no-compile", "-c", str(constraints)),
                *("{opts}", "{packages}"),
            ]
        ),
        commands_pre=[_installs([*targets, *example], constraints)],
        commands=[*main_job, *tests],
        ignore_errors=True,
        set_env=(
            f"PIP_CONSTRAINT={constraints}\nPIP_BUILD_CONSTRAINT={constraints}\n"
            "PIP_DISABLE_PIP_VERSION_CHECK=1\nOMP_NUM_THREADS=1"
        ),
    )


_states: list[State] = []
"""The state of this call of tox."""


@impl
def tox_extend_envs() -> Iterable[str]:
    """The environments' names: the folders' names, alone and with the matrix' factors."""
    return (*package_folders(), *matrix_environments())


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Tell tox what runs by default and what to install where, before it reads any section."""
    _states[:] = [state]
    folders = package_folders()
    core_conf.loaders.insert(0, MemoryLoader(env_list=EnvList([*DEFAULT_ENVIRONMENTS, *folders])))
    seeds = state.conf.memory_seed_loaders
    for name in folders:
        command = [*WHEELS, "--install", *install_names(name, folders)]
        seeds[name].append(MemoryLoader(commands_pre=[Command(command)]))
    arguments = state.conf.pos_args(None) or ()
    for name, (packages, factors) in matrix_environments().items():
        seeds[name].append(_varied(packages, factors, ROOT / ".tox", arguments))


@impl
def tox_on_install(tox_env: ToxEnv, arguments: object, section: str, of_type: str) -> None:
    """Let the environment have what all share before anything is installed that needs it."""
    if not _shares(tox_env):
        _begin_early(tox_env)
    _share(tox_env)


@impl
def tox_before_run_commands(tox_env: ToxEnv) -> None:
    """Make what the environment's own commands install."""
    name = tox_env.conf.name
    if name in matrix_environments():
        for folder in package_folders().values():
            # what setuptools left from former builds: a wheel would have modules deleted since
            shutil.rmtree(folder / "build", ignore_errors=True)
    if _shares(tox_env):
        _share(tox_env)
        python = str(tox_env.conf["env_python"])
        _build(build_folders(name), python, lambda command: _execute(tox_env, command))


def _shares(tox_env: ToxEnv) -> bool:
    return tox_env.conf.name in {*package_folders(), *WITH_ALL_WHEELS}


def _share(tox_env: ToxEnv) -> None:
    """Put the folder with what all these environments need from elsewhere on its path, and fill it first."""
    if not _shares(tox_env):
        return
    site = Path(tox_env.conf["env_site_packages_dir"])
    folder = _fill_shared(tox_env, lambda command: _execute(tox_env, command))
    own = site.relative_to(tox_env.conf["env_dir"])
    (site / "shared.pth").write_text(f"{folder / own}\n")


def _fill_shared(tox_env: ToxEnv, execute: Callable[[list[str]], object]) -> Path:
    """The folder with what all environments with this one's Python need, filled by ``execute`` if it is not."""
    needed = [*_project(package_folders()["xla-core"])["dependencies"], *_test_runner()]
    site = Path(tox_env.conf["env_site_packages_dir"])
    text = "\n".join([*needed, CONSTRAINTS.read_text(), site.parent.name])
    folder = SHARED / hashlib.sha256(text.encode()).hexdigest()[:16]
    SHARED.mkdir(parents=True, exist_ok=True)
    with FileLock(SHARED / "lock"):
        if not (folder / "complete").exists():
            for old in SHARED.glob("*/"):
                shutil.rmtree(old)
            pip = [*PIP_INSTALL, "--ignore-installed", "--no-warn-script-location", "--prefix"]
            execute([str(tox_env.conf["env_python"]), *pip, str(folder), *needed])
            (folder / "complete").touch()
    return folder


_early: list[threading.Thread] = []
"""The thread that works ahead, once it has begun."""


def _begin_early(tox_env: ToxEnv) -> None:
    """Begin what the environments after this one share, beside its own commands, which use one processor.

    If that fails, the first environment that needs it does it again, and shows why.
    """
    selected = set(_states[0].envs.iter()) if _states else set()
    if _early or "tests" not in selected:
        return
    quietly = functools.partial(subprocess.run, check=True, capture_output=True)

    def work() -> None:
        with contextlib.suppress(subprocess.CalledProcessError, Fail):
            _fill_shared(tox_env, quietly)
            _build(build_folders("tests"), str(tox_env.conf["env_python"]), quietly)

    _early.append(threading.Thread(target=work, daemon=True))
    _early[0].start()


def _test_runner() -> list[str]:
    """What runs the tests in every environment: ``deps`` of ``[testenv]``."""
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini")
    return settings["testenv"]["deps"].split()


_built: set[str] = set()
"""Folders whose wheels were built in this call of tox."""
_building = threading.Lock()


def build_folders(name: str) -> list[str]:
    """The folders whose wheels the environment ``name`` installs."""
    folders = package_folders()
    if name in folders:
        return [text.partition("[")[0] for text in install_names(name, folders)]
    return [*folders, "acme"]


def _build(names: Iterable[str], python: str, execute: Callable[[list[str]], object]) -> None:
    """Build the wheels of these folders that this call of tox has not built yet."""
    with _building:
        missing = [name for name in names if name not in _built]
        if missing:
            execute([python, *WHEELS[1:], *missing])
            _built.update(missing)


def _execute(tox_env: ToxEnv, command: list[str]) -> None:
    outcome = tox_env.execute(command, stdin=StdinSource.OFF, run_id="shared", show=False)
    if outcome.exit_code:
        raise Fail(f"{outcome.shell_cmd}\n{outcome.out}{outcome.err}")
