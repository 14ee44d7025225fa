"""Finds repeats that run in a row, each on what the one before computed, and makes loops of them.

A pure algorithm on ``Node`` objects, beside ``repeats.search``, which finds repeats anywhere. A sequence whose
keys equal those ``p`` positions later, over a range of several ``p``, is periodic there (Crochemore 1981). Where in
the period an iteration begins is chosen so that as many iterations as possible fit and few values go from one
to the next. A range is a loop if, in every iteration, each value from outside is the same, or what the iteration
before computed in the same place, or one that was there before the loop.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import numpy as np

from xla_core.lowering.loops.items import Step
from xla_core.lowering.loops.wiring import Draft, wired
from xla_core.lowering.repeats.items import CostModel, Node
from xla_core.lowering.repeats.search import parameters_of
from xla_core.lowering.repeats.windows import Segment, Windows

# These bound the time of the search:
_PERIODS: Final = 64  # lengths of an iteration that are examined
_PLACES: Final = 8  # places in a period where an iteration may begin
_LOOKS: Final = 200  # positions that are examined, per position of the sequence


def find_loops(
    nodes: Sequence[Node],
    wanted: Collection[int],
    min_trips: int,
    model: CostModel,
    pays: Callable[[Draft], bool],
    inner: Collection[int] = (),
) -> list[Step]:
    """``nodes`` with loops of at least ``min_trips`` iterations; empty if there are none.

    ``nodes`` are in program order, ``wanted`` are the numbers of the values that the program returns. An
    iteration weighs at least ``model.min_weight``, a loop saves at least ``model.min_saving``, and
    ``pays(draft)`` says whether it is worth the copies of what it reads and gives. No iteration takes or gives a
    value of ``inner`` (default: none). The result computes the same values.
    """
    search = _Search(nodes, wanted, min_trips, model, pays, inner)
    drafts = sorted(search.drafts(), key=lambda d: d.start)
    return wired(nodes, drafts, wanted) if drafts else []


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """A range of positions whose keys equal those ``period`` later, that last period included."""

    begin: int
    end: int
    period: int


class _Search:
    def __init__(
        self,
        nodes: Sequence[Node],
        wanted: Collection[int],
        min_trips: int,
        model: CostModel,
        pays: Callable[[Draft], bool],
        inner: Collection[int],
    ) -> None:
        self.nodes = nodes
        self.min_trips = min_trips
        self.model = model
        self.least = max(model.min_saving, 1.0)
        self.pays = pays
        self.inner = frozenset(inner)
        self.view = Windows([Segment(list(nodes), frozenset(wanted))])
        self.work = 0
        self.symbols = self.view.ranks[0][: len(nodes)]

    def drafts(self) -> Iterator[Draft]:
        """Loops that do not overlap; those that save most come first."""
        taken = np.zeros(len(self.nodes), bool)
        for span in self._spans():
            if self.work > _LOOKS * len(self.nodes):
                return
            for begin, end in _ranges(~taken[span.begin : span.end]):
                piece = _Span(span.begin + begin, span.begin + end, span.period)
                draft = self._best(piece)
                if draft is not None:
                    taken[draft.start : draft.end] = True
                    yield draft

    def _spans(self) -> list[_Span]:
        """The periodic ranges, those that could save most first."""
        spans: list[tuple[float, _Span]] = []
        for period in self._periods():
            for begin, end in _ranges(self.symbols[period:] == self.symbols[:-period]):
                saving = self._saving(begin, end + period, period)
                if saving >= self.least:
                    spans.append((saving, _Span(begin, end + period, period)))
        # positions break ties, so that the result does not depend on the sort
        spans.sort(key=lambda s: (-s[0], s[1].period, s[1].begin))
        return [span for _, span in spans]

    def _periods(self) -> list[int]:
        """Distances at which runs follow each other without a gap, the most promising first."""
        times: Counter[int] = Counter()
        for level in range(len(self.view.ranks)):
            for _, starts, lengths in self.view.groups(level, self.model.min_weight):
                gaps = np.diff(starts)
                for gap in gaps[lengths >= gaps].tolist():
                    times[gap] += gap
        return [period for period, _ in times.most_common(_PERIODS)]

    def _saving(self, begin: int, end: int, period: int) -> float:
        """What a loop over a range saves at most; nothing if it is too short."""
        trips = (end - begin) // period
        if trips < self.min_trips:
            return 0.0
        weight = float(self.view.weights[begin + period] - self.view.weights[begin])
        return (trips - 1) * weight if weight >= self.model.min_weight else 0.0

    def _best(self, span: _Span) -> Draft | None:
        """The best loop in a range, or None if there is none that pays."""
        period = span.period
        if self._saving(span.begin, span.end, period) < self.least:
            return None
        # as in ``repeats.search``: cuts are counted in the middle, and a value that crosses one costs twice
        middle = span.begin + (span.end - span.begin) // period // 2 * period
        cuts = self.view.cuts(middle, period)
        places: list[tuple[float, int]] = []
        for shift in range(period):
            start = span.begin + shift
            trips = (span.end - start) // period
            saving = self._saving(start, span.end, period)
            places.append((2.0 * self.model.per_value * cuts[shift] * trips - saving, start))
        for _, start in sorted(places)[:_PLACES]:
            draft = self._draft(start, (span.end - start) // period, period)
            if draft is not None:
                return draft if self.pays(draft) else None
        return None

    def _draft(self, start: int, trips: int, period: int) -> Draft | None:
        """A loop from ``start``, if need be without its first or last iteration; None if there is none."""
        for first, count in ((0, trips), (1, trips - 1), (0, trips - 1), (1, trips - 2)):
            begin = start + first * period
            if self._saving(begin, begin + count * period, period) >= self.least:
                draft = self._wiring(begin, count, period)
                if draft is not None:
                    return draft
        return None

    def _wiring(self, start: int, trips: int, period: int) -> Draft | None:
        self.work += trips * period
        starts = range(start, start + trips * period, period)
        if len({self.view.flow(begin, period)[0] for begin in starts}) > 1:
            return None
        windows = [self.nodes[begin : begin + period] for begin in starts]
        parameters = parameters_of(windows)
        # the body is an iteration in which all parameters have different values
        body = next((i for i, p in enumerate(parameters) if len(set(p)) == len(p)), None)
        if body is None:
            return None
        values = [[v for node in window for v in node.results] for window in windows]
        rows = list(zip(*parameters, strict=True))
        end = start + trips * period
        needed = [{v for v in vs if self.view.needed_after(0, v, end)} for vs in values]
        draft = Draft(start, list(windows[body]), body, trips, rows, values, needed)
        return draft if draft.is_loop() and not self._cuts_inner(draft) else None

    def _cuts_inner(self, draft: Draft) -> bool:
        """Whether an iteration takes or gives a value that must not cross its borders."""
        if not self.inner:
            return False
        ends = range(draft.start + len(draft.body), draft.end + 1, len(draft.body))
        given = (
            value in self.inner and self.view.needed_after(0, value, end)
            for values, end in zip(draft.values, ends, strict=True)
            for value in values
        )
        return any(given) or not self.inner.isdisjoint(v for row in draft.rows for v in row)


def _ranges(flags: np.ndarray) -> list[tuple[int, int]]:
    """The maximal ranges (begin, end) in which all flags are set."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
