"""What the tests of all packages share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from xla_core.testing import forked_programs


def pytest_collection_finish() -> None:
    """Leave what imports and collection made to the end out of later garbage collections.

    Tests that look at reference cycles or at lifetimes collect garbage themselves; walking over all of torch,
    jax and the collected tests took them 0.3 seconds each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def program_servers() -> Iterator[Iterator[forked_programs.Server]]:
    """Processes that have imported torch and jax, in turns: programs are forked from them."""
    with forked_programs.servers() as in_turns:
        yield in_turns
