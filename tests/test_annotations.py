"""``Any`` only at torch's and jax's borders, and where the code of users and other libraries begins.

A type that has a name is written by its name. What nobody looks into is an ``object``. What a type checker cannot
know has a name that says what it is: in ``torch_bridge/operands.py``, ``jax_bridge/traced_values.py`` or
``contract/foreign_values.py``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source_tree import ROOT, SOURCES, parsed

CORE = ROOT / "packages" / "xla-core" / "src" / "xla_core"
BORDERS = (CORE / "torch_bridge", CORE / "jax_bridge", CORE / "contract" / "foreign_values.py")


def is_at_a_border(path: Path) -> bool:
    """Whether the types of torch's, jax's or others' values are named here."""
    return any(path.is_relative_to(border) for border in BORDERS)


def uses_of_any(tree: ast.AST) -> list[int]:
    """The lines on which a module writes ``Any`` or ``typing.Any``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
    ]


@pytest.mark.parametrize(
    "path", [s for s in SOURCES if not is_at_a_border(s)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_other_module_writes_any(path):
    assert uses_of_any(parsed(path)) == []


def test_the_borders_exist():
    assert all(border.exists() for border in BORDERS)


def test_uses_are_found():
    text = "def f(x: Any, *y: list[Any]) -> dict[str, Any]: ...\nz: typing.Any = 1"
    assert sorted(uses_of_any(ast.parse(text))) == [1, 1, 1, 2]
