"""Docstrings of the public surface name every parameter and every error (public_docstrings.py looks)."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import public_docstrings

LEAST = 350


def test_parameters_and_errors_are_described():
    # a process of its own: it imports modules that warn, or that start plugins
    sources = Path(util.find_spec("torch_xla").origin).parents[1]
    done = subprocess.run(
        [sys.executable, public_docstrings.__file__, str(sources)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    *gaps, last = done.stdout.splitlines()
    assert not gaps
    assert int(last.split()[0]) > LEAST


def test_gaps_are_seen():
    def three(first: int, second: int, third: int) -> None:
        if first:
            raise KeyError(second)
        raise ValueError(third)

    text = "Raises ValueError for ``first`` and ``third``."
    assert list(public_docstrings.left_out(three, text)) == ["second", "KeyError"]
    assert not list(public_docstrings.left_out(three, text + " ``second``: KeyError."))
