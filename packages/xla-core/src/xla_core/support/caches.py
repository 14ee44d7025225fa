"""The caches of the process: each module that has one lists here how it is emptied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = [
    "MOST",
    "clear_all",
    "on_clear",
]

MOST: Final = 16_384
"""Entries of a cache that begins anew when it is full: of what is quickly found out again."""

_clearers: list[Callable[[], None]] = []


def on_clear(clear: Callable[[], None]) -> Callable[[], None]:
    """Call ``clear`` when all caches are emptied; gives it back, for use as a decorator."""
    _clearers.append(clear)
    return clear


def clear_all() -> None:
    """Empty every cache that is listed."""
    for clear in _clearers:
        clear()
