"""The repository's source files, as the tests of its rules read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def at(path: Path, node: ast.stmt | ast.expr) -> str:
    """Where a node is, for the message of a test that fails."""
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def path_of_src(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "src")


def module_name(path: Path) -> str:
    """The dotted name by which a source file is imported."""
    parts = path.relative_to(path_of_src(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    """The name of the folder under ``packages/`` that a file is in."""
    return path.relative_to(ROOT / "packages").parts[0]


MODULES = {module_name(path): path for path in SOURCES}
