"""docs/reference: written from the modules as they are now."""

from __future__ import annotations


def test_pages_are_what_the_modules_have(run_tool):
    assert run_tool("reference_pages.py", "--check") == "", "python tools/reference_pages.py"
