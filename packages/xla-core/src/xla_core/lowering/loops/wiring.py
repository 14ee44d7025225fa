"""What loops read and what is read of them: carried values, and stacks of the values of all iterations.

A value of every iteration that is needed after its loop is kept in a stack. A later loop that reads the values of a
stack in order, or in the opposite order as the backward pass does, reads them from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from xla_core.lowering.loops.items import (
    Build,
    Carried,
    Element,
    Invariant,
    Lifts,
    Loop,
    Source,
    Stack,
    Step,
    Take,
)
from xla_core.lowering.repeats.items import Node


@dataclasses.dataclass(slots=True, eq=False)
class Draft:
    """A range of nodes that may become a loop.

    ``rows`` has, for each value that an iteration reads from outside, its number in each of them. ``values`` has
    the numbers of all values that each iteration computes, and ``needed`` of those that are needed after the
    loop. ``body`` are the nodes of iteration number ``chosen``.
    """

    start: int
    body: list[Node]
    chosen: int
    trips: int
    rows: list[tuple[int, ...]]
    values: list[list[int]]
    needed: list[set[int]]

    @property
    def end(self) -> int:
        """The position after the last node."""
        return self.start + self.trips * len(self.body)

    def is_loop(self) -> bool:
        """Whether every iteration reads the same values, those of the one before, and those before the loop."""
        own = self.own()
        return all(
            self.carried_from(row) is not None or own.isdisjoint(row)
            for row in self.rows
            if row[0] >= 0
        )

    def own(self) -> set[int]:
        """The values that the iterations compute."""
        return {value for values in self.values for value in values}

    def kept(self) -> list[bool]:
        """For each value of an iteration, whether it is needed after the loop of another one than the last."""
        early = list(zip(self.values, self.needed, strict=True))[:-1]
        return [any(vs[i] in needed for vs, needed in early) for i in range(len(self.values[0]))]

    def carried_from(self, row: Sequence[int]) -> int | None:
        """The place among an iteration's values of what the next one reads as ``row``, or None."""
        if row[1] not in self.values[0]:
            return None
        place = self.values[0].index(row[1])
        inner = all(row[i + 1] == self.values[i][place] for i in range(self.trips - 1))
        return place if inner and row[0] not in self.own() else None


def wired(nodes: Sequence[Node], drafts: Sequence[Draft], wanted: Iterable[int]) -> list[Step]:
    """``nodes`` with loops in place of the ranges of ``drafts``, which are in program order and do not overlap."""
    wiring = _Wiring(drafts)
    for item in _items(nodes, drafts):
        if isinstance(item, Node):
            wiring.take(item.operands)
            wiring.steps.append(item)
        else:
            wiring.add_loop(item)
    wiring.take(wanted)
    return wiring.steps


class _Wiring:
    """Adds steps one by one, and knows which values are elements of stacks only."""

    def __init__(self, drafts: Iterable[Draft]) -> None:
        self.steps: list[Step] = []
        # the rows of values that loops read, by each of them
        self.rows: dict[int, list[tuple[int, ...]]] = {}
        for draft in drafts:
            for row in draft.rows:
                for value in row:
                    self.rows.setdefault(value, []).append(row)
        # the stacks that have a value, and where
        self.places: dict[int, dict[Stack, int]] = {}
        # values that loops compute and that are no values of their own yet
        self.inside: set[int] = set()

    def take(self, values: Iterable[int]) -> None:
        """Make values of their own of those that are elements of stacks only."""
        for value in values:
            if value in self.inside:
                self.inside.discard(value)
                stack, index = next(iter(self.places[value].items()))
                self.steps.append(Take(value, stack, index))

    def add_loop(self, draft: Draft) -> None:
        """Append a loop, after the stacks and values that it needs."""
        sources = {row[draft.chosen]: self._source(draft, row) for row in draft.rows}
        loop = Loop(draft.body, draft.trips, sources, [], {})
        self.steps.append(loop)
        self.inside |= draft.own()
        self._keep(draft, loop)

    def _source(self, draft: Draft, row: tuple[int, ...]) -> Source:
        if len(set(row)) == 1:
            self.take(row[:1])
            return Invariant(row[0])
        if row[0] < 0:
            return Lifts(row)
        place = draft.carried_from(row)
        if place is not None:
            self.take(row[:1])
            return Carried(row[0], draft.values[draft.chosen][place])
        return self._element(row)

    def _element(self, row: tuple[int, ...]) -> Element:
        """The elements of a stack that ``row`` names, of one that is there if one has them in a regular order."""
        for stack, first in self.places.get(row[0], {}).items():
            at = [self.places.get(value, {}).get(stack) for value in row]
            if at[1] is not None and at == [first + i * (at[1] - first) for i in range(len(at))]:
                return Element(stack, first, at[1] - first)
        self.take(row)
        stack = self._new_stack(row)
        self.steps.append(Build(stack))
        return Element(stack, 0, 1)

    def _new_stack(self, elements: Iterable[int]) -> Stack:
        stack = Stack(tuple(elements))
        for index, value in enumerate(stack.elements):
            self.places.setdefault(value, {}).setdefault(stack, index)
        return stack

    def _keep(self, draft: Draft, loop: Loop) -> None:
        """Decide which values of a loop become stacks, and which are needed of its last iteration only."""
        kept, body, final = draft.kept(), draft.values[draft.chosen], draft.values[-1]
        passed_on: set[int] = set()
        for parameter, source in loop.sources.items():
            if isinstance(source, Carried):
                place = body.index(source.result)
                given = [values[place] for values in draft.values]
                if place not in passed_on and kept[place] and not self._reads_last(given):
                    # what iterations begin with, as a backward pass reads it
                    loop.kept.append((parameter, self._new_stack((source.first, *given[:-1]))))
                    kept[place] = False
                passed_on.add(place)
        for place, value in enumerate(body):
            if kept[place]:
                stack = self._new_stack(values[place] for values in draft.values)
                loop.kept.append((value, stack))
            if final[place] in draft.needed[-1] and (place in passed_on or not kept[place]):
                loop.last[value] = final[place]
                self.inside.discard(final[place])

    def _reads_last(self, given: Sequence[int]) -> bool:
        """Whether another loop reads what all iterations give to the next, the last one's result included."""
        return any(given[-1] in row for row in self.rows.get(given[0], ()))


def _items(nodes: Sequence[Node], drafts: Sequence[Draft]) -> Iterator[Node | Draft]:
    position = 0
    for draft in drafts:
        yield from nodes[position : draft.start]
        yield draft
        position = draft.end
    yield from nodes[position:]
