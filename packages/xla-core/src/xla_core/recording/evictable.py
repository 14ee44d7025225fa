"""Compiled programs that can be evicted from all tables that hold them, and be made again."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from xla_core.contract.device_protocol import Executable
from xla_core.contract.foreign_values import CoreProgram, ForeignObject


class Table(dict[ForeignObject, CoreProgram]):
    """A table of programs: a dict that weak references can refer to."""

    __slots__ = ("__weakref__",)


_uses = itertools.count(1)


class Kept:
    """An executable that tables of this process hold until it is evicted."""

    __slots__ = ("__weakref__", "_places", "executable", "used")

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.used = next(_uses)
        self._places: list[tuple[weakref.ref[Table], object, Callable[[], object]]] = []

    def keep(self, table: Table, key: object, value: object = None) -> None:
        """Set ``table[key]`` to ``value`` (default: this object) until this is evicted."""
        value = self if value is None else value
        self._places.append((weakref.ref(table), key, weakref.ref(value)))
        table[key] = value

    def mark_used(self) -> None:
        """Mark this as the most recently used."""
        self.used = next(_uses)

    def leave(self) -> None:
        """Remove this from all tables that hold it."""
        places, self._places = self._places, []
        for place, key, kept in places:
            table, value = place(), kept()
            if table is not None and value is not None and table.get(key) is value:
                del table[key]
