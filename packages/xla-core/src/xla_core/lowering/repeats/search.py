"""Finds repeats in a sequence of operations: runs that are equal up to renaming of their values.

A pure algorithm on ``Node`` objects. Runs with equal node keys are
found by prefix doubling (Karp, Miller and Rosenberg 1972: windows of 2, 4, 8, ... keys get numbers,
so that two windows of any length can be compared in constant time). Those that save most are replaced by
calls (``Call``) of one shared ``Function``, and the search continues in the remaining sequence and inside the
functions, as in grammar compression (Larsson and Moffat 2000). Before a run is replaced, its data flow is
compared exactly. The result is deterministic. Each round takes O(n log^2 n) vectorised operations, and there are
few rounds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from xla_core.lowering.repeats.items import (
    DEFAULT_COSTS,
    Call,
    CostModel,
    Function,
    Item,
    Node,
    Plan,
    flat_nodes,
)
from xla_core.lowering.repeats.windows import Segment, Windows

# These bound the time of the search:
_CANDIDATES: Final = 256  # groups of windows that one round examines
_LOOKS: Final = 6  # positions that one round examines, per position of the sequence
_PLACES: Final = 8  # rotations of a run that are examined
_MAX_ROUNDS: Final = 24
# A call costs almost nothing to compile, so a run of calls is no reason for a function.
_CALL_WEIGHT: Final = 0.1
# One round replaces only runs that save at least this share of what the best run saves:
# replacing small runs early would break up larger ones.
_ROUND_SHARE: Final = 0.3


def find_repeats(
    nodes: Sequence[Node], wanted: Iterable[int], model: CostModel = DEFAULT_COSTS
) -> Plan:
    """Replace repeated runs of ``nodes`` by calls of functions.

    ``nodes`` are in program order, ``wanted`` are the numbers of the values that the program returns, and
    ``model`` decides which runs are worth a function. The plan computes the same values in the same order.
    ``Plan.work`` counts the examined positions, for tests of the running time.
    """
    search = _Search(list(nodes), frozenset(wanted), model)
    for _ in range(_MAX_ROUNDS):
        if not search.round():
            break
    return Plan(
        search.segments[0].items,
        [s.function for s in search.segments[1:] if s.function],
        search.work,
    )


@dataclasses.dataclass(slots=True)
class _Run:
    """Windows of one length with equal keys and equal data flow, as positions in the whole sequence."""

    length: int
    starts: list[int]
    saving: float


class _Search:
    def __init__(self, nodes: list[Node], wanted: frozenset[int], model: CostModel) -> None:
        self.segments = [Segment(list(nodes), wanted)]
        self.model = model
        self.work = 0

    def round(self) -> bool:
        """Replace the runs that save most now; returns False if there are none."""
        view = Windows(self.segments)
        self.work += len(view.items)
        runs = self._runs(view)
        if not runs:
            return False
        # Positions that a better run of this round has taken. A worse run must be checked again without the
        # occurrences that overlap these: it may then save too little, or need another body.
        taken = np.zeros(len(view.items) + 1, bool)
        replaced: list[tuple[int, int, Call]] = []
        for run in runs:
            if run.saving < _ROUND_SHARE * runs[0].saving:
                break
            starts = [s for s in run.starts if not taken[s : s + run.length].any()]
            if len(starts) < len(run.starts):
                left = self._by_data_flow(view, run.length, starts)
                run = max(left, key=lambda r: r.saving, default=_Run(0, [], 0.0))
                if run.saving < _ROUND_SHARE * runs[0].saving:
                    continue
            for start in run.starts:
                taken[start : start + run.length] = True
            replaced += self._outline(view, run)
        self._replace(view, replaced)
        return bool(replaced)

    # -- candidates ------------------------------------------------------------------------------

    def _runs(self, view: Windows) -> list[_Run]:
        """The most promising runs, the best first."""
        runs: list[_Run] = []
        # Comparing data flow is the expensive part, so a round stops when it has used up its budget. The groups
        # that could save most come first, and the next round examines the others.
        budget = self.work + _LOOKS * len(view.items)
        covered = np.zeros(len(view.items), bool)
        for _level, starts, lengths in self._groups(view):
            if self.work > budget:
                break
            # The rotations of one repeat are equally good candidates: ``_placed`` chooses among them.
            if covered[starts].mean() > 0.5:
                continue
            best = _Run(0, [], 0.0)
            # Equal windows of 2**level keys only tell where runs begin; the runs extend as far as keys are equal.
            for length in _useful_lengths(lengths):
                for same in view.classes(starts, length):
                    for run in self._by_data_flow(view, length, same):
                        best = max(best, run, key=lambda r: r.saving)
            if best.saving >= self.model.min_saving:
                best = self._placed(view, best)
                runs.append(best)
                for start in best.starts:
                    covered[start : start + best.length] = True
        return sorted(runs, key=lambda r: (-r.saving, r.starts[0], -r.length))

    def _groups(self, view: Windows) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Groups of positions with equal windows; those that could save most come first."""
        groups: list[tuple[float, int, np.ndarray, np.ndarray]] = []
        for level in range(len(view.ranks)):
            for bound, starts, lengths in view.groups(level, self.model.min_weight):
                if bound >= self.model.min_saving:
                    groups.append((bound, level, starts, lengths))
        # Level and position break ties, so that the result does not depend on the sort.
        groups.sort(key=lambda g: (-g[0], g[1], int(g[2][0])))
        return [(level, starts, lengths) for _, level, starts, lengths in groups[:_CANDIDATES]]

    def _by_data_flow(self, view: Windows, length: int, starts: Sequence[int]) -> list[_Run]:
        """Split windows with equal keys into runs whose inner data flow is equal as well."""
        # Occurrences may overlap (in a series of equal keys): keep the leftmost, and those that follow after it.
        chosen: list[int] = []
        for start in starts:
            if not chosen or start >= chosen[-1] + length:
                chosen.append(start)
        if self._saving(view, chosen, length) < self.model.min_saving:
            return []
        # The inner data flow must be equal, because it is the function's. Which of the values from outside
        # coincide may differ between calls, because a call can pass one value for two parameters
        # (``_with_common_body``).
        classes: dict[Hashable, dict[tuple[int, ...], list[int]]] = {}
        self.work += length * len(chosen)
        for start in chosen:
            inside, outside = view.flow(start, length)
            classes.setdefault(inside, {}).setdefault(outside, []).append(start)
        runs = [
            _Run(length, starts, self._saving(view, starts, length))
            for patterns in classes.values()
            for starts in _with_common_body(patterns)
        ]
        return [run for run in runs if run.saving >= self.model.min_saving]

    def _saving(self, view: Windows, starts: Sequence[int], length: int) -> float:
        """What windows at ``starts``, which must not overlap, save as calls of one function."""
        if len(starts) < 2:
            return 0.0
        weight = float(view.weights[starts[0] + length] - view.weights[starts[0]])
        if weight < self.model.min_weight:
            return 0.0
        # A call in the body of a function is compiled once, but runs as often as the body.
        calls = sum(view.times[view.segment_of[start]] for start in starts)
        return (len(starts) - 1) * weight - calls * self.model.per_call

    def _placed(self, view: Windows, run: _Run) -> _Run:
        """The rotation of a run that saves most and passes the fewest values between neighbouring calls."""
        # Consecutive layers repeat, whichever operation of the first layer the run begins with. The beginning
        # decides which values cross from call to call: more of them inside a softmax than between two layers.
        length, first = run.length, run.starts[0]
        # Cuts are counted at an occurrence in the middle: the first and the last one have other neighbours.
        cuts = view.cuts(run.starts[len(run.starts) // 2], length)
        # each value that crosses a cut is a result of one call and an operand of the next
        price = 2.0 * self.model.per_value
        rotations: list[tuple[float, int, list[int]]] = []
        for shift in range(length):
            # a rotation may gain an occurrence before the first, and lose the last one
            starts = [s + shift for s in (first - length, *run.starts) if s + shift >= 0]
            same = max(view.classes(np.array(starts), length), key=len, default=[])
            score = self._saving(view, same, length) - price * cuts[shift] * len(same)
            rotations.append((-score, shift, same))
        rotations.sort()
        self.work += length * len(run.starts)
        best, best_score = run, run.saving - price * cuts[0] * len(run.starts)
        # The estimates ignore data flow, which can only remove occurrences: a rotation whose estimate is
        # already worse need not be examined.
        for estimate, shift, same in rotations[:_PLACES]:
            if -estimate <= best_score:
                break
            for other in self._by_data_flow(view, length, same):
                score = other.saving - price * cuts[shift] * len(other.starts)
                if score > best_score:
                    best, best_score = other, score
        return best

    # -- replacing -------------------------------------------------------------------------------

    def _outline(self, view: Windows, run: _Run) -> list[tuple[int, int, Call]]:
        """Make the function of a run, and its calls as (start, end, call)."""
        windows = [view.items[s : s + run.length] for s in run.starts]
        results = self._results(view, run, windows)
        parameters = parameters_of(windows)
        # The body is an occurrence in which all parameters have different values.
        body = next(i for i, p in enumerate(parameters) if len(set(p)) == len(p))
        weight = float(view.weights[run.starts[0] + run.length] - view.weights[run.starts[0]])
        flat = [[v for item in window for v in item.results] for window in windows]
        # Value numbers belong to the whole sequence: the body keeps those of its occurrence, and each call has
        # its own numbers for the parameters and results.
        function = Function(
            index=len(self.segments),
            body=list(windows[body]),
            parameters=parameters[body],
            results=tuple(flat[body][i] for i in results),
            weight=weight,
            calls=len(windows),
        )
        self.segments.append(Segment(function.body, frozenset(function.results), function))
        return [
            (
                start,
                start + run.length,
                Call(
                    function,
                    operands,
                    tuple(values[i] for i in results),
                    tuple(flat_nodes(window)),
                    _CALL_WEIGHT,
                ),
            )
            for start, window, values, operands in zip(
                run.starts, windows, flat, parameters, strict=True
            )
        ]

    def _results(self, view: Windows, run: _Run, windows: Sequence[Sequence[Item]]) -> list[int]:
        """Positions, among the values of a window, of those that are needed outside it in some occurrence."""
        # All calls of a function have the same results: a value that is needed after one call is returned by all.
        needed: set[int] = set()
        for start, window in zip(run.starts, windows, strict=True):
            segment = view.segment_of[start]
            end = start + run.length
            position = 0
            for item in window:
                for value in item.results:
                    if view.needed_after(segment, value, end):
                        needed.add(position)
                    position += 1
        return sorted(needed)

    def _replace(self, view: Windows, replaced: list[tuple[int, int, Call]]) -> None:
        """Replace windows by calls."""
        calls = {start: (end, call) for start, end, call in replaced}
        for index in {view.segment_of[start] for start in calls}:
            position = view.offsets[index]
            end_of_segment = position + len(self.segments[index].items)
            items: list[Item] = []
            while position < end_of_segment:
                if position in calls:
                    position, call = calls[position]
                    items.append(call)
                else:
                    items.append(view.items[position])
                    position += 1
            self.segments[index].items[:] = items


def _with_common_body(patterns: dict[tuple[int, ...], list[int]]) -> Iterator[list[int]]:
    """Split windows into groups that can share a body.

    ``patterns`` maps the equalities among the values that windows read from outside to the starts of the windows
    with these equalities.
    """
    # A body that reads one value in two places cannot represent an occurrence that reads two values there. All
    # windows can share a body if one pattern keeps apart every pair of values that any pattern keeps apart.
    together = tuple(zip(*patterns, strict=True))
    most = max(len(set(p)) for p in patterns)
    if len(set(together)) == most:
        yield sorted(start for starts in patterns.values() for start in starts)
    else:
        yield from patterns.values()


def parameters_of(windows: Sequence[Sequence[Item]]) -> list[tuple[int, ...]]:
    """For each window, the values that it reads from outside, as operands for the function's parameters."""
    # One column per window, one row per operand from outside. Rows that are equal in every window become one
    # parameter: each distinct row is passed once.
    columns: list[list[int]] = []
    for window in windows:
        own: set[int] = set()
        column: list[int] = []
        for item in window:
            column.extend(v for v in item.operands if v not in own)
            own.update(item.results)
        columns.append(column)
    distinct = dict.fromkeys(zip(*columns, strict=True))
    if not distinct:
        return [()] * len(windows)
    return list(zip(*distinct, strict=True))


def _useful_lengths(lengths: np.ndarray) -> list[int]:
    """The three most promising lengths, given how far positions match their predecessors."""
    # A length serves all pairs that match at least that far, so it saves about the length times their number. A
    # length between two that occur serves no more pairs than the longer one.
    counts = Counter(int(n) for n in lengths)
    best = sorted(counts, reverse=True)
    total = 0
    scored: list[tuple[int, int]] = []
    for length in best:
        total += counts[length]
        scored.append((total * length, length))
    scored.sort(reverse=True)
    return [length for _, length in scored[:3]]
