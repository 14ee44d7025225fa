"""What the tests of GPUs share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def run_on_cuda():
    """Run a script with arguments in a process whose device is CUDA; what it printed. Keywords are variables."""

    def run(code, *arguments, **environment):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=os.environ | {"PJRT_DEVICE": "CUDA"} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
