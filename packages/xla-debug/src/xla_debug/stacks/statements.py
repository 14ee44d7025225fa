"""Finds the loops and branches around a line of the user's source, from the file's syntax tree.

A recorded step shows which lines ran. If a line ran five times, or not at all, a statement around it is the reason,
and that statement is what the user has to change.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
from typing import Final

from xla_core.extension_api.source_location import Frame
from xla_core.support import caches

_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MOST_FILES: Final = 64

_trees: caches.Bounded[str, ast.Module | None] = caches.Bounded("syntax trees", _MOST_FILES)


@dataclasses.dataclass(frozen=True)
class Block:
    """A body, lines ``first`` to ``last`` of a file, of the loop or ``if`` statement in line ``header``."""

    filename: str
    header: int
    first: int
    last: int

    def holds(self, frame: Frame) -> bool:
        """Whether a frame's line is in the block."""
        return frame.filename == self.filename and self.first <= frame.line <= self.last


def _tree(filename: str) -> ast.Module | None:
    if filename in _trees:
        return _trees.get(filename)
    try:
        tree: ast.Module | None = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        tree = None  # not a Python file, or one that was changed since
    return _trees.keep(filename, tree)


def _span(nodes: list[ast.stmt]) -> tuple[int, int]:
    return nodes[0].lineno, max(node.end_lineno or node.lineno for node in nodes)


def _path(frame: Frame) -> list[ast.AST]:
    """The nodes of the syntax tree around a line, outermost first, inside the line's function."""
    nodes: list[ast.AST] = []
    level: list[ast.AST] = [tree] if (tree := _tree(frame.filename)) is not None else []
    while level:
        for node in level:
            first = getattr(node, "lineno", frame.line)
            if first <= frame.line <= (getattr(node, "end_lineno", None) or frame.line):
                if isinstance(node, _FUNCTIONS):
                    nodes.clear()  # a loop around the definition of a function does not repeat the function's lines
                nodes.append(node)
        level = [
            child
            for node in level
            for child in ast.iter_child_nodes(node)
            if _contains(child, frame)
        ]
    return nodes


def _contains(node: ast.AST, frame: Frame) -> bool:
    first = getattr(node, "lineno", None)
    return first is not None and first <= frame.line <= (getattr(node, "end_lineno", None) or first)


def loops_around(frame: Frame) -> list[Block]:
    """The bodies of loops around a line, innermost first, inside the line's function."""
    loops: list[Block] = []
    for node in reversed(_path(frame)):
        if isinstance(node, _LOOPS):
            block = Block(frame.filename, node.lineno, *_span(node.body))
            if block.holds(frame):
                loops.append(block)
    return loops


def arms_around(frame: Frame) -> list[Block]:
    """The arms of ``if`` statements around a line, innermost first, inside the line's function."""
    around: list[Block] = []
    for node in reversed(_path(frame)):
        if isinstance(node, ast.If):
            arms = [body for body in (node.body, node.orelse) if body]
            blocks = [Block(frame.filename, node.lineno, *_span(body)) for body in arms]
            around.extend(block for block in blocks if block.holds(frame))
    return around


def is_condition(frame: Frame) -> bool:
    """Whether a line is part of the condition of an ``if``, ``while`` or ``assert``."""
    tests = (
        n.test for n in _path(frame) if isinstance(n, (ast.If, ast.While, ast.Assert, ast.IfExp))
    )
    return any(_contains(test, frame) for test in tests)
