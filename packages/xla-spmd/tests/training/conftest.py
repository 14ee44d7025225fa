"""What the tests of training share: their programs are compiled as users' are."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled_as_users_programs_are():
    """Other tests here take what is compiled fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_COMPILE_EFFORT")
        yield
