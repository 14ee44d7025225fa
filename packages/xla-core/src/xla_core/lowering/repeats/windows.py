"""Windows of a sequence of items: which are equal, which values cross their borders, and their data flow.

Windows of 1, 2, 4, ... keys have numbers, so that two windows of any length can be compared in constant time
(Karp, Miller and Rosenberg 1972).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from xla_core.lowering.repeats.items import Call, Function, Item, Node


@dataclasses.dataclass(slots=True)
class Segment:
    """The top level (``function`` None) or one function's body."""

    items: list[Item]
    wanted: frozenset[int]
    function: Function | None = None


class Windows:
    """All segments as one sequence of small integers, with the numbering of their windows."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.items: list[Item] = []
        self.offsets: list[int] = []
        self.segment_of: list[int] = []
        symbols: list[int] = []
        numbers: dict[Hashable, int] = {}
        # Each segment ends with a unique symbol, so that equal windows never span two segments.
        stop = Node(None, (), (), 0.0)
        for index, segment in enumerate(segments):
            self.offsets.append(len(self.items))
            self.items += segment.items
            symbols += [numbers.setdefault(item.key, len(numbers)) for item in segment.items]
            self.items.append(stop)
            symbols.append(numbers.setdefault(("end", index), len(numbers)))
            self.segment_of += [index] * (len(segment.items) + 1)
        self.weights = np.concatenate([[0.0], np.cumsum([item.weight for item in self.items])])
        self.last_use = self._last_uses()
        self.times = self._times()
        self.ranks = _number_windows(np.array(symbols, np.int64))

    def _last_uses(self) -> list[dict[int, int]]:
        """For each segment, the position of the last item that reads each value."""
        uses: list[dict[int, int]] = [{} for _ in self.segments]
        for position, item in enumerate(self.items):
            last = uses[self.segment_of[position]]
            for value in item.operands:
                last[value] = position
        return uses

    def _times(self) -> list[int]:
        """How often each segment runs in one execution of the program."""
        index = {id(s.function): i for i, s in enumerate(self.segments) if s.function is not None}
        callers: list[Counter[int]] = [Counter() for _ in self.segments]
        for position, item in enumerate(self.items):
            if isinstance(item, Call):
                callers[index[id(item.function)]][self.segment_of[position]] += 1
        known = {0: 1}

        def times(segment: int) -> int:
            if segment not in known:
                known[segment] = sum(n * times(c) for c, n in callers[segment].items())
            return known[segment]

        return [times(i) for i in range(len(self.segments))]

    def cuts(self, first: int, length: int) -> list[int]:
        """For each of ``length`` positions from ``first``, the number of values that cross a cut there.

        Only values that are read within a distance of ``length`` count: those that one occurrence
        of a repeat passes to the next, not those that are kept longer.
        """
        # A difference array: each value adds 1 where it becomes alive and subtracts it after its last use, so
        # that the running sum is the number of live values.
        change = [0] * (2 * length + 1)
        made_at: dict[int, int] = {}
        until: dict[int, int] = {}
        # a value that crosses a cut and is read within ``length`` of its definition was made after this position
        low = max(first - length, 0)
        for position in range(low, min(first + 2 * length, len(self.items))):
            item = self.items[position]
            for value in item.operands:
                if value in made_at and position - made_at[value] <= length:
                    until[value] = position
            for value in item.results:
                made_at[value] = position
        for value, last in until.items():
            begin, end = max(made_at[value] + 1, first), min(last, first + length)
            if begin <= end:
                change[begin - first] += 1
                change[end + 1 - first] -= 1
        return list(itertools.accumulate(change[:length]))

    def needed_after(self, segment: int, value: int, end: int) -> bool:
        """Whether ``value`` is read at ``end`` or later, or is a result of the segment."""
        return (
            self.last_use[segment].get(value, -1) >= end or value in self.segments[segment].wanted
        )

    def groups(
        self, level: int, min_weight: float
    ) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """Groups of positions whose windows of 2**level keys are equal.

        For each group, yields an upper bound of what it can save, the positions, and for each position but the
        first the length that it has in common with the previous position. That length ends where the two would
        overlap or, if the items between them weigh less than ``min_weight``, after several such distances.
        """
        # A stable sort puts equal windows next to each other in the order of their positions, so that
        # neighbours in the sorted order are consecutive occurrences.
        ranks = self.ranks[level]
        order = np.argsort(ranks, kind="stable")
        same = ranks[order][1:] == ranks[order][:-1]
        before, after = order[:-1][same], order[1:][same]
        if not len(after):
            return
        gaps = after - before
        # Runs longer than the gap would overlap. But if the period is short (a loop of two operations), a
        # run of several periods may be worth a function although one period is not. A call counts as a node
        # here, because even many calls weigh almost nothing.
        period = np.maximum(self.weights[after] - self.weights[before], gaps)
        periods = np.ceil(min_weight / period).astype(np.int64)
        lengths = np.minimum(self._common(before, after), gaps * periods)
        bounds = self.weights[after + np.minimum(lengths, gaps)] - self.weights[after]
        # A group of equal windows ends where the positions of the pairs are not consecutive.
        pairs = np.flatnonzero(same)
        first = np.flatnonzero(np.diff(pairs, prepend=-2) > 1)
        totals = np.add.reduceat(bounds, first)
        ends = [*first[1:].tolist(), len(pairs)]
        for begin, end, total in zip(first.tolist(), ends, totals.tolist(), strict=True):
            starts = order[pairs[begin] : pairs[end - 1] + 2]
            yield total, starts, lengths[begin:end]

    def _common(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The number of keys that the sequences from ``left`` and from ``right`` (later) have in common."""
        # From the widest windows down to single keys: where windows are equal, both positions advance by their
        # width. This gives the common length digit by digit in binary, without comparing each key.
        left, right = left.copy(), right.copy()
        shared = np.zeros(len(left), np.int64)
        for level in range(len(self.ranks) - 1, -1, -1):
            ranks = self.ranks[level]
            fits = right < len(ranks)
            equal = np.zeros(len(left), bool)
            equal[fits] = ranks[left[fits]] == ranks[right[fits]]
            step = np.where(equal, 1 << level, 0)
            shared += step
            left += step
            right += step
        return shared

    def classes(self, starts: np.ndarray, length: int) -> list[list[int]]:
        """``starts`` split by the content of the windows of ``length`` keys that begin there."""
        level = min(length.bit_length() - 1, len(self.ranks) - 1)
        ranks = self.ranks[level]
        by_content: dict[tuple[int, ...], list[int]] = {}
        # Windows that cover the whole length: the last one overlaps the one before if they do not divide it.
        step = 1 << level
        offsets = [*range(0, length - step, step), length - step]
        for start in starts.tolist():
            if start + length <= len(self.items):
                by_content.setdefault(tuple(int(ranks[start + o]) for o in offsets), []).append(
                    start
                )
        return list(by_content.values())

    def flow(self, start: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The data flow of a window, as two tuples.

        The first has, for each operand, the position of its value among those made in the window, or -1. The
        second has, for each operand from outside, the number of its value in order of appearance.
        """
        own: dict[int, int] = {}
        others: dict[int, int] = {}
        inside: list[int] = []
        outside: list[int] = []
        for item in self.items[start : start + length]:
            for value in item.operands:
                position = own.get(value, -1)
                inside.append(position)
                if position < 0:
                    outside.append(others.setdefault(value, len(others)))
            for value in item.results:
                own[value] = len(own)
        return tuple(inside), tuple(outside)


def _number_windows(symbols: np.ndarray) -> list[np.ndarray]:
    """Numbers for all windows of 1, 2, 4, ... symbols: equal windows have equal numbers."""
    levels = [symbols]
    width = 1
    while len(levels[-1]) > width:
        ranks = levels[-1]
        # two adjacent windows of ``width`` as one number, which is below 2**63 for fewer than 3e9 positions
        pairs = ranks[:-width] * (int(ranks.max()) + 1) + ranks[width:]
        unique, numbered = np.unique(pairs, return_inverse=True)
        if len(unique) == len(pairs):
            break  # all windows differ, and so do all longer ones
        levels.append(numbered.astype(np.int64))
        width *= 2
    return levels
