"""Names of lowered operations that say where in the user's program they were recorded."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from typing import Final

from xla_core.recording.entry import Entry, Operation
from xla_core.recording.source_location import Detail, SourceLocation, detail
from xla_core.support import caches

MARK: Final = "@"
_MARKED: Final = re.compile(MARK + r"(\d+)(?=/|$)")
OPTIMIZER_SCOPE: Final = "optimizer"
"""The scope of operations that an optimizer's step records, which are in no module."""
_places: caches.Bounded[int, SourceLocation] = caches.Bounded(
    "places of lowered operations", bound=65_536
)
_INDICES: Final = re.compile(r"\.\d+(?=[./]|$)")
_NOT_IN_NAMES: Final = re.compile(r"\W+", re.ASCII)


def scope_name(entry: Operation) -> str:
    """The name of an operation's instructions in the lowered program."""
    where: SourceLocation | None = entry.where
    name = entry.plan.name
    if detail() is Detail.LINES:
        name = f"{name}{MARK}{_number(where)}"
    return f"{where.scope}/{name}" if where is not None and where.scope else name


def _number(where: SourceLocation | None) -> int:
    """The number that stands for a place in a name; 0 if there is no place."""
    if where is not None:
        _places.keep(id(where), where)
    return 0 if where is None else id(where)


def common_scope(entries: Iterable[Entry]) -> str:
    """The modules that operations have in common, as a name: ``Net_blocks``; empty if none was located.

    Indices of modules in a list are left out, because repeated operations belong to several of them.
    """
    places = (entry.where for entry in entries if entry.where is not None)
    scopes = [p.scope or (OPTIMIZER_SCOPE if p.optimizer else "") for p in places]
    if not scopes:
        return ""
    common = posixpath.commonpath([_INDICES.sub("", scope).strip("/") for scope in scopes])
    return _NOT_IN_NAMES.sub("_", common)


def relocation() -> Callable[[str], tuple[str, str, int] | None] | None:
    """A function from the name of a lowered operation to its clean name, file and line; None without detail.

    The function returns None for operations whose line is unknown. For an operation in the body of a
    computation it takes the operation's own line, whose mark comes last in the name.
    """
    return None if detail() is Detail.NONE else _relocated


def _relocated(name: str) -> tuple[str, str, int] | None:
    marks = _MARKED.findall(name)
    if not marks:
        return None
    where = _places.get(int(marks[-1]))
    clean = _MARKED.sub("", name)
    if where is None or not where.frames:
        return clean, "", 0
    return clean, where.frames[0].filename, where.frames[0].line
