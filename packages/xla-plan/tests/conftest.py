"""Shared by the tests: where steps are, and that what compiles needs libtpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
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
