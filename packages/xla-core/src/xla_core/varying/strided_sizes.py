"""Sizes behind strides: ``floor((L + k) / d)`` of a length, and numbers that are made of such sizes.

A convolutional net has one for each of its strides. Each is looked for as a small part of a size before it, so that
few steps tell what it is: the parts of a part are parts of the length.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

LEAST_SAMPLES: Final = 4
"""So many steps are needed to tell: of two or three any number may be a part of any other."""
MOST_CANDIDATES: Final = 4
_MOST_DIVISOR: Final = 8
_MOST_FLOORS: Final = 12
# A number is a product of so many lengths and sizes behind strides: images of a batch, seen as rows.
_MOST_FACTORS: Final = 3

Explained = tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]
"""A constant, and terms: a factor, and the numbers of what it is multiplied with."""


class Floor(NamedTuple):
    """``(length + added) // divisor`` of the length of number ``which``."""

    which: int
    added: int
    divisor: int

    def longest(self, most: int) -> int:
        """The largest length of which it is at most ``most``."""
        return (most + 1) * self.divisor - 1 - self.added


def product(lengths: Sequence[Any], which: Sequence[int]) -> Any:
    """The product of the lengths of these numbers."""
    result = lengths[which[0]]
    for number in which[1:]:
        result = result * lengths[number]
    return result


def related(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one of two columns of sizes may be the other behind a stride."""
    return any(_floor_of(a, [b], (), 1) is not None for a, b in ((one, other), (other, one)))


def explained(
    columns: Sequence[np.ndarray], lengths: Sequence[np.ndarray], sizes: Collection[bytes]
) -> tuple[list[Explained], tuple[Floor, ...]] | None:
    """For each column of numbers a constant and a term that give it, and the floors that terms may have.

    ``sizes`` are the bytes of columns that can be floors. None where a column is left over.
    """
    known = list(lengths)
    floors: list[Floor] = []
    rest = sorted(range(len(columns)), key=lambda number: -float(columns[number].mean()))
    answers: dict[int, Explained] = {}
    while rest:
        left = [n for n in rest if not _explain(columns[n], known, n, answers)]
        if not left:
            break
        if len(floors) == _MOST_FLOORS:
            return None
        for number in left:
            column = columns[number]
            floor = (
                _floor_of(column, known, floors, len(lengths))
                if column.tobytes() in sizes
                else None
            )
            if floor is not None:
                floors.append(floor)
                known.append((lengths[floor.which] + floor.added) // floor.divisor)
                break
        else:
            return None
        rest = left
    return [answers[number] for number in range(len(columns))], tuple(floors)


def _explain(
    column: np.ndarray, known: Sequence[np.ndarray], number: int, answers: dict[int, Explained]
) -> bool:
    """Whether a column is a multiple of a product and a constant; what it is goes to ``answers``."""
    numbers = range(len(known))
    for count in range(1, _MOST_FACTORS + 1):
        for which in itertools.combinations_with_replacement(numbers, count):
            along = product(known, which)
            factor = _multiple(column, along)
            if factor is not None:
                answers[number] = int(column[0] - factor * along[0]), ((factor, which),)
                return True
    return False


def _multiple(column: np.ndarray, along: np.ndarray) -> int | None:
    """How many times as much ``column`` changes as ``along``, None unless it is always as many times."""
    change, by = column - column[0], along - along[0]
    where = int(np.argmax(by != 0))
    if by[where] == 0 or change[where] % by[where]:
        return None
    factor = int(change[where] // by[where])
    return factor if factor and np.array_equal(change, factor * by) else None


def _floor_of(
    column: np.ndarray, known: Sequence[np.ndarray], floors: Sequence[Floor], count: int
) -> Floor | None:
    """What part of a length a column is, but for a constant: of the smallest size that it is a small part of."""
    for parent in sorted(range(len(known)), key=lambda number: float(np.ptp(known[number]))):
        for divisor in range(2, _MOST_DIVISOR + 1):
            for added in dict.fromkeys((divisor - 1, 0, *range(divisor))):
                part = (known[parent] + added) // divisor
                if np.ptp(part) and not np.ptp(part - column):
                    if parent < count:
                        return Floor(parent, added, divisor)
                    before = floors[parent - count]
                    more = added * before.divisor
                    return Floor(before.which, before.added + more, before.divisor * divisor)
    return None
