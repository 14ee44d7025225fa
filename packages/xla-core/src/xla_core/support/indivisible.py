"""Changes that no exception comes between, be it Ctrl-C's or one that another thread sets.

Python delivers both between the bytecodes of Python functions only, so what one call into C does is done as
a whole. ``do`` makes one such call of a series of changes. Each is an iterator that runs no Python
function: ``map`` over builtins, over ``setattr`` of slots, over bound methods of extension classes.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "do",
    "storing",
    "storing_each",
]


def do(*work: Iterable[object]) -> None:
    """Exhaust the iterators one after the other; what one raises ends it, and is raised."""
    collections.deque(itertools.chain.from_iterable(work), maxlen=0)


def storing(target: object, names: Iterable[str], values: Iterable[object]) -> Iterator[None]:
    """For ``do``: give attributes of ``target`` new values."""
    return map(setattr, itertools.repeat(target), names, values)


def storing_each(name: str, targets: Sequence[object], values: Iterable[object]) -> Iterator[None]:
    """For ``do``: give one attribute of every target its value; ``values`` are taken one by one."""
    return map(setattr, targets, itertools.repeat(name), values)
