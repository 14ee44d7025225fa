"""Shared by the tests: where steps are, and that what compiles needs libtpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata, util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """``command(*arguments)`` runs ``xla-plan``; its finished process, with ``plans`` where it wrote any."""
    if util.find_spec("libtpu") is None:
        pytest.skip(
            "libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14"
        )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "TPU_", "PJRT_"))}

    def run(*arguments):
        target = tmp_path_factory.mktemp("plans") / "plans.json"
        name, *rest = map(str, arguments)
        done = subprocess.run(
            [sys.executable, "-m", "xla_plan.cli", name, "--json", str(target), *rest],
            env=clean, capture_output=True, text=True, timeout=600, cwd=ROOT,
        )  # fmt: skip
        done.plans = json.loads(target.read_text()) if target.is_file() else None
        return done

    return run


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
