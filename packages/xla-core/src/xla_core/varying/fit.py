"""Which lengths the numbers of steps with one skeleton depend on, and how.

A number is constant, or ``a + b * L + c * L * L`` with integer factors for a length ``L``, or a sum of products of
two lengths, or of three (the height and width of images, and the number of boxes). Lengths are sizes of the step's
values. Strides make sizes that are ``floor((L + k) / d)``; these then count as lengths, and sums of their products
are numbers as well. A fit predicts all numbers of later steps, so a wrong fit has no effect: it predicts no step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from xla_core.jax_bridge.symbolic_sizes import floored
from xla_core.jax_bridge.traced_values import Size
from xla_core.varying import strided_sizes
from xla_core.varying.limits import NEAR
from xla_core.varying.strided_sizes import Explained, Floor, product

# Lengths are searched for among this many different columns of sizes.
_MOST_CANDIDATES: Final = 8
# A number is the sum of at most this many products of lengths, and a constant.
_MOST_TERMS: Final = 3
# This many steps are needed to tell three lengths apart.
_STEPS_OF_THREE: Final = 5
# Beyond this, floats cannot represent all integers.
_LARGEST_FACTOR: Final = 2.0**52

Term = tuple[int, tuple[int, ...]]
"""A factor, and the numbers of the lengths that it is multiplied with; floors are numbered after the lengths."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """``lengths`` are the positions of the numbers that are lengths, ``terms`` the terms of each varying number.

    ``constants`` are the numbers themselves, or what is added to the terms if a number varies. ``floors`` are sizes
    behind strides, which terms may contain in place of lengths.
    """

    lengths: tuple[int, ...]
    constants: np.ndarray
    terms: dict[int, tuple[Term, ...]]
    floors: tuple[Floor, ...] = ()

    def lengths_of(self, numbers: np.ndarray) -> tuple[int, ...] | None:
        """The lengths of a step with these numbers; None unless the lengths predict every number."""
        lengths = tuple(int(numbers[position]) for position in self.lengths)
        return lengths if np.array_equal(self.predicted(lengths), numbers) else None

    def predicted(self, lengths: Sequence[Size]) -> np.ndarray:
        """The numbers of a step of these lengths; an array of objects if the lengths are symbolic."""
        plain = all(isinstance(length, int) for length in lengths)
        numbers = self.constants.astype(np.int64 if plain else object)
        behind = [floored(lengths[f.which] + f.added, f.divisor) for f in self.floors]
        lengths = [*lengths, *behind]
        known: dict[tuple[Term, ...], Size] = {}
        for position, terms in self.terms.items():
            if terms not in known:
                known[terms] = sum(factor * product(lengths, which) for factor, which in terms)
            numbers[position] = numbers[position] + known[terms]
        return numbers

    def at_most(self, hints: Mapping[int, int | None], limits: Sequence[int]) -> tuple[int, ...]:
        """``limits`` of the lengths, lowered so that no number exceeds its hint (by position; None is no limit)."""
        lowered = list(limits)
        for position, most in hints.items():
            terms = self.terms.get(position, ())
            if (
                most is not None
                and terms
                and len(terms) == len(terms[0][1]) == 1
                and terms[0][0] > 0
            ):
                factor, (which,) = terms[0]
                end = (most - int(self.constants[position])) // factor
                if which >= len(limits):
                    floor = self.floors[which - len(limits)]
                    which, end = floor.which, floor.longest(end)
                lowered[which] = min(lowered[which], end)
        return tuple(lowered)

    def room(self, positions: Iterable[int]) -> tuple[int, ...]:
        """For each length, by how much the sizes at ``positions`` that are close to it exceed it at most."""
        most = [0] * len(self.lengths)
        for position in positions:
            terms, more = self.terms.get(position), int(self.constants[position])
            if terms is not None and len(terms) == 1 and more <= NEAR:
                factor, which = terms[0]
                if factor == len(which) == 1 and which[0] < len(most):
                    most[which[0]] = max(most[which[0]], more)
        return tuple(most)

    def multiples(self) -> set[tuple[int, int, int]]:
        """Multiples of one length plus a constant: the number of the length, the positive factor, the constant."""
        factors = set()
        for position, terms in self.terms.items():
            factor, which = terms[0]
            if len(terms) == len(which) == 1 and factor > 0 and which[0] < len(self.lengths):
                factors.add((which[0], factor, int(self.constants[position])))
        return factors


def fit(samples: Sequence[np.ndarray], candidates: Sequence[int], most: int = 3) -> Fit | None:
    """A fit of ``samples``, the numbers of several steps; None if none is found.

    ``candidates`` are the positions of the numbers that can be lengths. One length is tried first, then two (with
    three samples or more), then sizes behind strides (with four), and last three lengths (with five). A fit has at
    most ``most`` lengths (default: 3).
    """
    table = np.stack(samples).astype(np.int64)
    varying = np.flatnonzero((table != table[0]).any(axis=0))
    columns, inverse = np.unique(table[:, varying], axis=1, return_inverse=True)
    columns = columns.T
    inverse = np.asarray(inverse).reshape(-1)
    possible: dict[bytes, int] = {}
    allowed = np.intersect1d(np.asarray(candidates, np.int64), varying)
    for position in allowed.tolist():
        possible.setdefault(table[:, position].tobytes(), position)
    sizes = {table[:, position].tobytes() for position in allowed.tolist()}
    by_span = sorted(possible.values(), key=lambda p: int(np.ptp(table[:, p])))[:_MOST_CANDIDATES]
    by_place = sorted(possible.values())[: strided_sizes.MOST_CANDIDATES]  # inputs come first
    enough = len(samples) >= strided_sizes.LEAST_SAMPLES
    needed = {1: 0, 2: 3, 3: _STEPS_OF_THREE}
    counts = [count for count in range(1, most + 1) if len(samples) >= needed[count]]
    for count in counts:
        for chosen in itertools.combinations(by_span, count):
            lengths = [table[:, p] for p in chosen]
            if count > 1 and not enough and strided_sizes.related(*lengths):
                continue  # the next step will tell
            explained = _all_explained(list(columns), lengths)
            if explained is not None:
                return _fitted(table[0], chosen, varying, inverse, explained, ())
        for chosen in itertools.combinations(by_place, count) if enough and count < 3 else ():
            more = len(samples) >= _STEPS_OF_THREE and most > count == 2
            strided = _strided(table, list(columns), chosen, sizes, possible if more else {})
            if strided is not None:
                return _fitted(table[0], strided[0], varying, inverse, *strided[1])
    return None


def _strided(
    table: np.ndarray,
    columns: Sequence[np.ndarray],
    chosen: tuple[int, ...],
    sizes: Collection[bytes],
    possible: Mapping[bytes, int],
) -> tuple[tuple[int, ...], tuple[list[Explained], tuple[Floor, ...]]] | None:
    """The lengths, and the terms of each column, if there are sizes behind strides; None if no lengths fit.

    The lengths are ``chosen``, and if need be one of the ``possible`` columns that these do not explain.
    """
    along = strided_sizes.explained(columns, [table[:, p] for p in chosen], sizes)
    if not isinstance(along, strided_sizes.Left):
        return chosen, along
    left = [columns[n] for n in along.columns if columns[n].tobytes() in possible]
    if not left:
        return None
    # the number of something, such as boxes, is smaller than the number of the image's places
    chosen = (*chosen, possible[min(left, key=lambda column: float(column.mean())).tobytes()])
    along = strided_sizes.explained(columns, [table[:, p] for p in chosen], sizes)
    return None if isinstance(along, strided_sizes.Left) else (chosen, along)


def _fitted(
    first: np.ndarray,
    chosen: tuple[int, ...],
    varying: np.ndarray,
    inverse: np.ndarray,
    explained: Sequence[tuple[int, tuple[Term, ...]]],
    floors: tuple[Floor, ...],
) -> Fit:
    """A fit in which each varying number has one of the ``explained`` forms; ``inverse`` says which."""
    constants = first.copy()
    terms = {}
    for position, kind in zip(varying.tolist(), inverse.tolist(), strict=True):
        constants[position], terms[position] = explained[kind]
    return Fit(chosen, constants, terms, floors)


def _all_explained(
    columns: Iterable[np.ndarray], lengths: Sequence[np.ndarray]
) -> list[tuple[int, tuple[Term, ...]]] | None:
    explanations = []
    for column in columns:
        explained = _explained(column, lengths)
        if explained is None:
            return None
        explanations.append(explained)
    return explanations


# The products that make the numbers of steps with one, two and three lengths; the frequent ones come first.
_PRODUCTS: Final[dict[int, tuple[tuple[int, ...], ...]]] = {
    1: ((0,), (0, 0)),
    2: ((0,), (1,), (0, 1), (0, 0), (1, 1), (0, 1, 1), (0, 0, 1)),
    3: ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)),
}


def _explained(
    column: np.ndarray, lengths: Sequence[np.ndarray]
) -> tuple[int, tuple[Term, ...]] | None:
    """A constant and terms that give a column of numbers, or None.

    Fewer terms are tried first. There must be one step more than unknowns, because any three numbers are a
    combination of a constant and two lengths, or of a constant, a length and its square.
    """
    products = _PRODUCTS[len(lengths)]
    if len(lengths) == 1 and len(column) < 3:
        products = products[:1]
    most = max(len(column) - 2, 1 if len(lengths) == 1 else 0)
    for count in range(1, min(len(products), most, _MOST_TERMS) + 1):
        for chosen in itertools.combinations(products, count):
            solution = _solved(column, [product(lengths, which) for which in chosen])
            if solution is not None:
                start, *factors = solution
                return start, tuple(zip(factors, chosen, strict=True))
    return None


def _solved(column: np.ndarray, along: Sequence[np.ndarray]) -> list[int] | None:
    """Integers with ``column == first + second * along[0] + ...``; None unless there is exactly one solution."""
    parts = [np.ones_like(column), *along]
    matrix = np.stack(parts, axis=1).astype(np.float64)
    if np.linalg.matrix_rank(matrix) < len(parts):
        return None
    solution = np.linalg.lstsq(matrix, column.astype(np.float64), rcond=None)[0]
    if np.abs(solution).max() > _LARGEST_FACTOR:
        return None
    factors = [int(number) for number in np.rint(solution)]
    fitted = sum(factor * part for factor, part in zip(factors, parts, strict=True))
    return factors if np.array_equal(fitted, column) else None
