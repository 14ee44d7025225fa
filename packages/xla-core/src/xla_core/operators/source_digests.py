"""Digests of Python source files that decide how programs are lowered, for the persistent cache's keys.

A file stands for itself and for what it imports of its own package, or of its own folder if it is in none:
an edited helper changes what a rule lowers to as much as an edited rule. Imports are read from the text,
so that those inside functions count too. Folders above the package are no part of a digest: two checkouts
of one source have equal ones.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Final

from xla_core.support import caches

_FROM: Final = re.compile(
    r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n\\]|\\\n)*)", re.MULTILINE
)
_IMPORT: Final = re.compile(r"^[ \t]*import[ \t]+((?:[^\n\\]|\\\n)*)", re.MULTILINE)
_NAME: Final = re.compile(r"\w+")
_DOTTED: Final = re.compile(r"[\w.]+")


def digest(starts: Iterable[str]) -> bytes:
    """A digest of the files ``starts`` and of all that they need; those that are not there are left out.

    A file is read once in a process: what counts is the source that was imported.
    """
    return _digest(frozenset(starts))


@caches.memoized("digests of sets of sources", 64)
def _digest(starts: frozenset[str]) -> bytes:
    digests: dict[str, bytes] = {}
    waiting = [Path(start) for start in starts]
    while waiting:
        path = waiting.pop()
        source = _read(path)
        if source is not None and source.label not in digests:
            digests[source.label] = source.digest
            waiting += source.needs
    total = hashlib.sha256()
    for label in sorted(digests):
        total.update(label.encode() + b"\0" + digests[label])
    return total.digest()


def code_digest(code: CodeType) -> bytes:
    """A digest of a function that no file has, such as one typed at a prompt."""
    total = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        total.update(
            code_digest(constant) if isinstance(constant, CodeType) else repr(constant).encode()
        )
    total.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return total.digest()


class _Source:
    """One file: its name below its package's folder, its digest, and the files that it imports."""

    __slots__ = ("digest", "label", "needs")

    def __init__(self, path: Path, content: bytes) -> None:
        home = _home(path)
        self.label = path.relative_to(home).as_posix()
        self.digest = hashlib.sha256(content).digest()
        self.needs = tuple(_imported(path, home, content.decode(errors="replace")))


@functools.cache
def _read(path: Path) -> _Source | None:
    try:
        return _Source(path, path.read_bytes())
    except OSError:
        return None


def _home(path: Path) -> Path:
    """The folder that holds the file's package, or the file itself."""
    home = path.parent
    while (home / "__init__.py").exists():
        home = home.parent
    return home


def _imported(path: Path, home: Path, text: str) -> Iterator[Path]:
    """The files of the same package, or folder, that ``text`` imports."""
    inside = path.relative_to(home).parts
    package = inside[0] if len(inside) > 1 else None
    for dots, module, names in _FROM.findall(text):
        if dots:
            base = path.parents[len(dots) - 1]
        elif _is_own(module, package):
            base = home
        else:
            continue
        base = base.joinpath(*filter(None, module.split(".")))
        yield from _file(base)
        for name in _NAME.findall(names):
            yield from _file(base / name)
    for modules in _IMPORT.findall(text):
        for module in _DOTTED.findall(modules):
            if _is_own(module, package):
                yield from _file(home.joinpath(*module.split(".")))


def _is_own(module: str, package: str | None) -> bool:
    return package is None or module.partition(".")[0] == package


def _file(path: Path) -> Iterator[Path]:
    for file in (path.parent / f"{path.name}.py", path / "__init__.py"):
        if path.name and file.is_file():
            yield file
