"""What the tests share: programs in processes of their own, with the TPU chosen."""

from __future__ import annotations

import itertools
import os

import pytest


@pytest.fixture(scope="session")
def first_server(program_servers):
    """The one from which each test's first program is forked."""
    return next(program_servers)


@pytest.fixture
def run_on_tpu(first_server, program_servers, tmp_path):
    """``run_on_tpu(code, *arguments, **environment)`` runs Python code as a user would; the finished process.

    A test's second program has another order of sets than its first.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "TPU_", "PJRT_"))}
    servers = itertools.chain((first_server,), program_servers)

    def run(code, *arguments, **environment):
        return next(servers).run(
            f"import sys\nsys.argv[1:] = {arguments}\n{code}",
            cwd=str(tmp_path),
            environment=clean | {"PJRT_DEVICE": "TPU"} | environment,
            timeout=600,
        )

    return run
