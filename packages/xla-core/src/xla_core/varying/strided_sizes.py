"""Sizes behind strides: ``floor((L + k) / d)`` of a length, and numbers that are computed from such sizes.

A convolutional network has one for each of its strides. Each is sought as a simple fraction of the size before it
(which is then also a fraction of the length), so that few steps suffice to identify it. A network with a feature
pyramid has one more number: the total number of places of all levels, which is a sum of products of such sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from xla_core.jax_bridge.traced_values import Size

LEAST_SAMPLES: Final = 4
"""This many steps are needed: among two or three, any column of numbers may be a fraction of any other."""
MOST_CANDIDATES: Final = 4
_MOST_DIVISOR: Final = 8
_WAYS: Final = [
    (divisor, added)
    for divisor in range(2, _MOST_DIVISOR + 1)
    for added in dict.fromkeys((divisor - 1, 0, *range(divisor)))
]
_MOST_FLOORS: Final = 12
# A number is a product of at most this many lengths and sizes behind strides, as for images seen as rows.
_MOST_FACTORS: Final = 3
# A number is the sum of at most this many others, which are sought among this many.
_MOST_SUMMED: Final = 6
_MOST_SUMMANDS: Final = 12

# sizes, or columns of them
S = TypeVar("S", bound=Size)

Term = tuple[int, tuple[int, ...]]
"""A factor, and the numbers of the sizes that it is multiplied with."""
Explained = tuple[int, tuple[Term, ...]]
"""A constant and terms, whose sum is a number."""


class Left(NamedTuple):
    """The numbers of the columns that remain unexplained."""

    columns: list[int]


class Floor(NamedTuple):
    """``(length + added) // divisor`` of the length with the number ``which``."""

    which: int
    added: int
    divisor: int

    def longest(self, most: int) -> int:
        """The largest length for which it is at most ``most``."""
        return (most + 1) * self.divisor - 1 - self.added


def product(lengths: Sequence[S], which: Sequence[int]) -> S:
    """The product of the lengths with these numbers."""
    result = lengths[which[0]]
    for number in which[1:]:
        result = result * lengths[number]
    return result


def related(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one of two columns of sizes may be the other one behind a stride."""
    pairs = ((one, other), (other, one))
    return any(_next_floor([a], [b], (), 1, {a.tobytes()}) is not None for a, b in pairs)


def explained(
    columns: Sequence[np.ndarray], lengths: Sequence[np.ndarray], sizes: Collection[bytes]
) -> tuple[list[Explained], tuple[Floor, ...]] | Left:
    """A constant and terms for each column of numbers, and the floors that the terms refer to.

    ``sizes`` has the bytes of the columns that can be floors.
    """
    known = list(lengths)
    floors: list[Floor] = []
    left = sorted(range(len(columns)), key=lambda number: -float(columns[number].mean()))
    answers: dict[int, Explained] = {}
    new = 0
    while True:
        products = _Products(known, new)
        for number in left:
            answer = products.explain(columns[number])
            if answer is not None:
                answers[number] = answer
        left = [number for number in left if number not in answers]
        new = len(known)
        floor = _next_floor([columns[n] for n in left], known, floors, len(lengths), sizes)
        if floor is None or len(floors) == _MOST_FLOORS:
            break
        floors.append(floor)
        known.append((lengths[floor.which] + floor.added) // floor.divisor)
    _explain_sums(columns, left, known, answers, sizes)
    left = [number for number in left if number not in answers]
    if left:
        return Left(left)
    return [answers[number] for number in range(len(columns))], tuple(floors)


class _Products:
    """Products of ``known`` sizes that have at least one of the sizes from number ``new`` on as a factor."""

    def __init__(self, known: Sequence[np.ndarray], new: int) -> None:
        self.factors = [
            which
            for count in range(1, _MOST_FACTORS + 1)
            for which in itertools.combinations_with_replacement(range(len(known)), count)
            if which[-1] >= new
        ]
        self.starts = np.empty((0,), np.int64)
        self.changes = np.empty((0, len(known[0])), np.int64)
        if self.factors:
            values = np.stack([product(known, which) for which in self.factors])
            self.starts, self.changes = values[:, 0], values - values[:, :1]

    def explain(self, column: np.ndarray) -> Explained | None:
        """A constant and a multiple of a product whose sum is ``column``, with the first product that fits."""
        change = column - column[0]
        at = int(np.argmax(change != 0))
        if not change[at]:
            return None
        by = self.changes[:, at]
        safe = np.where(by == 0, 1, by)
        times = change[at] // safe
        fitting = (by != 0) & (change == times[:, None] * self.changes).all(axis=1)
        if not fitting.any():
            return None
        first = int(np.argmax(fitting))
        factor = int(times[first])
        return int(column[0]) - factor * int(self.starts[first]), ((factor, self.factors[first]),)


def _next_floor(
    left: Sequence[np.ndarray],
    known: Sequence[np.ndarray],
    floors: Sequence[Floor],
    count: int,
    sizes: Collection[bytes],
) -> Floor | None:
    """The first remaining column of sizes that is, up to a constant, a fraction of a known size.

    It is returned as a floor of a length, since a floor of a floor is one. The first ``count`` of the ``known``
    sizes are lengths, the others are those of ``floors``.
    """
    parents = sorted(range(len(known)), key=lambda number: float(np.ptp(known[number])))
    parts = np.concatenate([_parts(known[parent]) for parent in parents])
    changes = parts - parts[:, :1]
    varying = changes.any(axis=1)
    for column in left:
        if column.tobytes() not in sizes:
            continue
        fitting = varying & (changes == column - column[0]).all(axis=1)
        if fitting.any():
            which, way = divmod(int(np.argmax(fitting)), len(_WAYS))
            parent, (divisor, added) = parents[which], _WAYS[way]
            if parent < count:
                return Floor(parent, added, divisor)
            before = floors[parent - count]
            more = added * before.divisor
            return Floor(before.which, before.added + more, before.divisor * divisor)
    return None


def _parts(size: np.ndarray) -> np.ndarray:
    divisors, added = np.array(_WAYS).T[:, :, None]
    parts: np.ndarray = (size + added) // divisors
    return parts


def _explain_sums(
    columns: Sequence[np.ndarray],
    left: Sequence[int],
    known: Sequence[np.ndarray],
    answers: dict[int, Explained],
    sizes: Collection[bytes],
) -> None:
    """Add to ``answers`` those of the columns ``left`` that are sums of others, or computed from sums."""
    sums: list[tuple[np.ndarray, Explained]] = []
    # the end of the second level among all places, for example, is a number but not a size
    is_other = {number: columns[number].tobytes() not in sizes for number in left}
    for number in sorted(left, key=lambda one: (is_other[one], float(columns[one].mean()))):
        column = columns[number]
        answer = next((a for one in sums if (a := _made_of_sum(column, *one, known))), None)
        if answer is None:
            answer = _sum_of(column, columns, answers, sizes)
        if answer is not None:
            answers[number] = answer
            sums.append((column, answer))


def _sum_of(
    column: np.ndarray,
    columns: Sequence[np.ndarray],
    answers: dict[int, Explained],
    sizes: Collection[bytes],
) -> Explained | None:
    """The fewest sizes with the same factor (such as the levels of a pyramid) whose sum is ``column``."""
    smaller = {
        columns[number].tobytes(): number
        for number, (_, terms) in answers.items()
        if len(terms) == 1
        and columns[number].tobytes() in sizes
        and (columns[number] < column).all()
    }
    factors = dict.fromkeys(answers[number][1][0][0] for number in smaller.values())
    for factor in factors:
        alike = [number for number in smaller.values() if answers[number][1][0][0] == factor]
        # levels have a height and a width, and are large
        alike.sort(key=lambda n: (-len(answers[n][1][0][1]), -float(columns[n].mean())))
        chosen = _summands(column, [columns[n] for n in alike[:_MOST_SUMMANDS]])
        if chosen:
            parts = [answers[alike[n]] for n in chosen]
            terms = tuple(term for _, terms in parts for term in terms)
            more = int(column[0]) - sum(int(columns[alike[n]][0]) for n in chosen)
            return more + sum(constant for constant, _ in parts), terms
    return None


def _summands(column: np.ndarray, parts: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The numbers of the fewest parts whose sum is ``column`` up to a constant; empty if there are none."""
    if len(parts) < 2:
        return ()
    chosen = [
        which
        for count in range(2, min(_MOST_SUMMED, len(parts)) + 1)
        for which in itertools.combinations(range(len(parts)), count)
    ]
    picked = np.zeros((len(chosen), len(parts)), np.int64)
    for row, which in enumerate(chosen):
        picked[row, list(which)] = 1
    rest = column - picked @ np.stack(parts)
    fitting = np.flatnonzero(np.ptp(rest, axis=1) == 0)
    if not fitting.size:
        return ()
    # among equally many parts, prefer those that leave no remainder
    best = min(fitting.tolist(), key=lambda row: (len(chosen[row]), bool(rest[row, 0])))
    return chosen[best]


def _made_of_sum(
    column: np.ndarray, total: np.ndarray, terms_of: Explained, known: Sequence[np.ndarray]
) -> Explained | None:
    """``column`` as a constant plus a multiple of a sum, or of the sum's product with a size."""
    constant, terms = terms_of
    for extra in ((), *((number,) for number in range(len(known)))):
        along = product([total, *known], (0, *(number + 1 for number in extra)))
        factor = _multiple(column, along)
        if factor is not None:
            start = int(column[0] - factor * along[0])
            products = [(factor * f, tuple(sorted((*which, *extra)))) for f, which in terms]
            if not extra:
                start += factor * constant
            elif constant:
                products.append((factor * constant, extra))
            return start, tuple(products)
    return None


def _multiple(column: np.ndarray, along: np.ndarray) -> int | None:
    """The integer factor by which ``column`` changes more than ``along``; None if there is no constant one."""
    change, by = column - column[0], along - along[0]
    where = int(np.argmax(by != 0))
    if by[where] == 0 or change[where] % by[where]:
        return None
    factor = int(change[where] // by[where])
    return factor if factor and np.array_equal(change, factor * by) else None
