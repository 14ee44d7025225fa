"""What can be forgotten and made again: programs in the tables where they are looked for."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any


class Table(dict[Any, Any]):
    """A table in which programs are found; a plain dict that can be referred to weakly."""

    __slots__ = ("__weakref__",)


_uses = itertools.count(1)


class Kept:
    """An executable that tables of this process hold, until it is evicted."""

    __slots__ = ("__weakref__", "_places", "executable", "used")

    def __init__(self, executable: Any) -> None:
        self.executable = executable
        self.used = next(_uses)
        self._places: list[tuple[weakref.ref[Table], object, Callable[[], object]]] = []

    def keep(self, table: Table, key: Any, value: Any = None) -> None:
        """Let ``table[key]`` be ``value`` (default: this object) until this is evicted."""
        value = self if value is None else value
        self._places.append((weakref.ref(table), key, weakref.ref(value)))
        table[key] = value

    def mark_used(self) -> None:
        """Note that this is the one used last."""
        self.used = next(_uses)

    def leave(self) -> None:
        """Take this out of all tables that hold it."""
        places, self._places = self._places, []
        for place, key, kept in places:
            table, value = place(), kept()
            if table is not None and value is not None and table.get(key) is value:
                del table[key]
