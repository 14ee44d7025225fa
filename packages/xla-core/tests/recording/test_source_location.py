"""The line that recorded an operation is the user's, whichever package of this project lies between."""

from __future__ import annotations

import pytest

from xla_core.recording import source_location
from xla_core.support.own_packages import IMPORT_NAMES

CALLER = "def call(function):\n    return function()\n"


def called_from(module):
    """A function that calls another one from a line of the module ``module``."""
    names = {"__name__": module}
    exec(compile(CALLER, f"{module}.py", "exec"), names)  # noqa: S102 - the name is what is tested
    return names["call"]


@pytest.mark.parametrize("package", [*IMPORT_NAMES, "torch", "contextlib"])
def test_lines_of_this_project_and_of_torch_are_passed_over(package):
    for module in (package, f"{package}.tensors.marking"):
        file, _ = called_from(module)(source_location.user_line)
        assert file == __file__


@pytest.mark.parametrize("module", ["__main__", "train", "xla_core_of_mine.model"])
def test_other_modules_are_the_users(module):
    assert called_from(module)(source_location.user_line) == (f"{module}.py", 2)
