"""The caches of the process: each has a name, a bound and a way to empty it.

What a long process goes on adding to at module level is one of these, or has a reason in
``tests/test_process_state.py`` why it does not grow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple, ParamSpec, TypeVar

from xla_core.contract.foreign_values import ForeignObject

__all__ = [
    "Bounded",
    "Cache",
    "MOST",
    "clear_all",
    "memoized",
    "register",
    "registered",
]

MOST: Final = 16_384
"""Entries of a cache of what is quickly found out again, unless it says otherwise."""

MSG_TWICE: Final = "there is a cache {name!r} already; each has a name of its own"

_K = TypeVar("_K")
_V = TypeVar("_V")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Cache(NamedTuple):
    """One cache: ``bound`` tells the most entries that it may have now, ``size`` those it has."""

    bound: Callable[[], int]
    size: Callable[[], int]
    clear: Callable[[], None]


_registered: dict[str, Cache] = {}


def register(
    name: str,
    *,
    bound: int | Callable[[], int],
    size: Callable[[], int],
    clear: Callable[[], None],
) -> None:
    """List a cache of another kind than ``Bounded`` and ``memoized``. Raises ValueError for a name twice."""
    if name in _registered:
        raise ValueError(MSG_TWICE.format(name=name))
    limit = bound if callable(bound) else functools.partial(int, bound)
    _registered[name] = Cache(limit, size, clear)


class Bounded(dict[_K, _V]):
    """A listed cache: a dict to read, in which ``keep`` writes; the older half goes when it is full."""

    __slots__ = ("_bound",)

    def __init__(self, name: str, bound: int = MOST) -> None:
        super().__init__()
        self._bound = bound
        register(name, bound=bound, size=self.__len__, clear=self.clear)

    def keep(self, key: _K, value: _V) -> _V:
        """Let ``key`` be found from now on; returns ``value``."""
        if len(self) >= self._bound and key not in self:
            for old in list(self)[: (self._bound + 1) // 2]:
                self.pop(old, None)
        self[key] = value
        return value

    def limit(self, bound: int) -> None:
        """Keep at most this number of entries from the next new one on."""
        self._bound = bound


def memoized(name: str, bound: int = 4096) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """``functools.lru_cache`` as a listed cache of at most this number of results."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        cached: ForeignObject = functools.lru_cache(maxsize=bound)(function)
        register(
            name, bound=bound, size=lambda: cached.cache_info().currsize, clear=cached.cache_clear
        )
        return cached  # type: ignore[no-any-return]

    return decorate


def registered() -> dict[str, Cache]:
    """All caches that are listed so far, by name."""
    return dict(_registered)


def clear_all() -> None:
    """Empty every cache that is listed."""
    for cache in list(_registered.values()):
        cache.clear()
