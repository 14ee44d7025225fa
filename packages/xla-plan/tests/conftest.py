"""Shared by the tests: where steps are, and that what compiles needs libtpu."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata, util
from pathlib import Path

import filelock  # torch requires it
import pytest

from xla_plan import cli

ROOT = Path(__file__).resolve().parents[3]
_UNWANTED = ("XLA_", "TPU_", "PJRT_")


@dataclasses.dataclass
class Done:
    """How a command ended, what it wrote, and ``plans`` where it wrote any."""

    returncode: int
    stdout: str
    stderr: str
    plans: list | None = None


@pytest.fixture(scope="session")
def typed_command(tmp_path_factory):
    """``typed_command(*arguments)`` runs ``xla-plan`` in a process of its own: how it ended."""
    _need_libtpu()
    return functools.partial(_planned, tmp_path_factory, _typed)


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """As ``typed_command``, but the commands share the process that imports torch and jax for their workers."""
    _need_libtpu()
    return functools.partial(_planned, tmp_path_factory, _called)


@pytest.fixture(scope="session")
def once(folder_of_run):
    """``once(name, make)``: what ``make()`` returns, called by one worker of the run; the others wait for it."""

    def get(name, make):
        path = folder_of_run / f"{name}.pickle"
        with filelock.FileLock(path.with_suffix(".lock")):
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
        return pickle.loads(path.read_bytes())

    return get


def _need_libtpu():
    if util.find_spec("libtpu") is None:
        pytest.skip(
            "libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14"
        )


def _planned(tmp_path_factory, run, *arguments):
    target = tmp_path_factory.mktemp("plans") / "plans.json"
    name, *rest = map(str, arguments)
    done = run([name, "--json", str(target), *rest])
    done.plans = json.loads(target.read_text()) if target.is_file() else None
    return done


def _typed(arguments):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_UNWANTED)}
    done = subprocess.run(
        [sys.executable, "-m", "xla_plan.cli", *arguments],
        env=clean, capture_output=True, text=True, timeout=600, cwd=ROOT,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def _called(arguments):
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(ROOT)
        for name in [name for name in os.environ if name.startswith(_UNWANTED)]:
            patch.delenv(name)
        status = cli.main(arguments)
    return Done(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def extension_path(tmp_path_factory):
    """A folder that makes this package's extensions known where the checkout is used without being installed."""
    folder = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((ROOT / "packages" / "xla-plan" / "pyproject.toml").read_text())[
        "project"
    ]
    group = "xla_core.extensions"
    declared = project["entry-points"][group]
    known = {point.value for point in metadata.entry_points(group=group)}
    if not known >= set(declared.values()):
        info = folder / f"xla_plan-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: xla-plan\nVersion: {project['version']}\n")
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in declared.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def server(program_servers):
    """One for all scripts, of which each is a test's only one."""
    return next(program_servers)


@pytest.fixture
def script(extension_path, server):
    """``script(code, **environment)`` runs Python on eight CPU devices with this package found: its process.

    Its programs are compiled fast: what is looked at does not depend on how well.
    """
    kept = ("XLA_", "TPU_", "PJRT_", "CPU_NUM_DEVICES")

    def run(code, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(kept)}
        chosen = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "XLA_COMPILE_EFFORT": "fast"}
        clean |= {**chosen, **environment}
        found = f"import sys\nsys.path.insert(0, {str(extension_path)!r})\n"
        code = found + textwrap.dedent(code)
        return server.run(code, cwd=str(ROOT), environment=clean, timeout=300)

    return run
