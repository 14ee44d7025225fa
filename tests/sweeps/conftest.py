"""What the sweeps share: the device they run on, and a clean trace after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything starts a client: a machine with a TPU sweeps its CPU too.
os.environ["PJRT_DEVICE"] = "CPU"


@pytest.fixture(autouse=True)
def clean_trace() -> Iterator[None]:
    """What a failed test left pending must not fail the next one."""
    from xla_core.testing.against_cpu import forget_pending

    yield
    forget_pending()
