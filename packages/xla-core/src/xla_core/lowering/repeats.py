"""Finds what repeats in a sequence of operations: runs that are equal up to renaming.

A pure algorithm on ``Node`` objects; it knows neither PyTorch nor jax. Runs of equal node keys are
found by prefix doubling (Karp, Miller and Rosenberg 1972: windows of 2, 4, 8, ... keys get numbers,
so that two windows of any length compare in constant time), the ones that save most are replaced by
a ``Call`` of one shared ``Function``, and the search goes on in what is left and inside the
functions, as in grammar compression (Larsson and Moffat 2000). Data flow is compared exactly before
a run is replaced. Deterministic; each round takes O(n log^2 n) vectorised operations, and there are
few rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One operation: ``key`` says everything about it but which values it reads.

    ``operands`` and ``results`` are value numbers, every value being the result of at most one node
    of a sequence. ``weight`` is what compiling it costs, ``payload`` is the caller's.
    """

    key: Hashable
    operands: tuple[int, ...]
    results: tuple[int, ...]
    weight: float = 1.0
    payload: Any = None


@dataclasses.dataclass(slots=True, eq=False)
class Function:
    """A run that is compiled once: the items of one occurrence, and what crosses its border.

    ``parameters`` and ``results`` are value numbers of that occurrence.
    """

    index: int
    body: list[Item]
    parameters: tuple[int, ...]
    results: tuple[int, ...]
    weight: float
    calls: int


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One use of a function: ``operands`` and ``results`` as its parameters and results, renamed.

    ``nodes`` are the operations it stands for, in the order in which they are in every other call
    of the function.
    """

    function: Function
    operands: tuple[int, ...]
    results: tuple[int, ...]
    nodes: tuple[Node, ...]
    weight: float

    @property
    def key(self) -> Hashable:
        """Calls of one function are alike."""
        return self.function


Item: TypeAlias = Node | Call


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """When a run is worth a function of its own; the unit is the compile cost of one plain node.

    A run of weight w that occurs k times saves (k - 1) * w, and costs ``per_call`` for each call in
    each run of the program, and ``per_value`` for each value that a call hands to its neighbour. It
    must weigh ``min_weight``, and save ``min_saving`` in all.
    """

    min_weight: float = 12.0
    min_saving: float = 40.0
    per_call: float = 1.0
    per_value: float = 1.0


# Bounds on time, not on quality: how many groups of windows one round looks at closely, how many
# positions per position of the sequence, how many rotations of a run, how many rounds there are.
_CANDIDATES: Final = 256
_LOOKS: Final = 6
_PLACES: Final = 8
_MAX_ROUNDS: Final = 24
# A call is next to nothing to compile: runs of calls are no reason for a function.
_CALL_WEIGHT: Final = 0.1
# In one round, runs are only taken if they save at least this part of what the best one saves:
# taking small ones early would cut up larger ones.
_ROUND_SHARE: Final = 0.3


@dataclasses.dataclass(slots=True)
class Plan:
    """A sequence with its repeats replaced by calls, and the functions in the order of discovery."""

    items: list[Item]
    functions: list[Function]
    work: int


def find_repeats(
    nodes: Sequence[Node], wanted: Iterable[int], model: CostModel = CostModel()
) -> Plan:
    """Replace repeated runs of ``nodes`` by calls of functions.

    ``nodes`` are in program order, ``wanted`` the numbers of the values that are needed in the end, and
    ``model`` says which runs are worth a function. The plan computes the same values in the same order.
    ``Plan.work`` counts positions looked at, for tests of the running time.
    """
    search = _Search(list(nodes), frozenset(wanted), model)
    for _ in range(_MAX_ROUNDS):
        if not search.round():
            break
    return Plan(search.segments[0].items, [s.function for s in search.segments[1:]], search.work)


@dataclasses.dataclass(slots=True)
class _Segment:
    """The top level (``function`` None) or one function's body."""

    items: list[Item]
    wanted: frozenset[int]
    function: Any = None


@dataclasses.dataclass(slots=True)
class _Run:
    """Windows of equal keys and equal data flow: global start positions of one length."""

    length: int
    starts: list[int]
    saving: float


class _Search:
    def __init__(self, nodes: list[Node], wanted: frozenset[int], model: CostModel) -> None:
        self.segments = [_Segment(list(nodes), wanted)]
        self.model = model
        self.work = 0

    def round(self) -> bool:
        """Replace the best runs of this moment; False when there are none."""
        view = _View(self.segments)
        self.work += len(view.items)
        runs = self._runs(view)
        if not runs:
            return False
        # Positions that a better run of this round has claimed. What is left of a worse one must be checked
        # again: without the claimed occurrences it may save too little, or have another body.
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

    def _runs(self, view: _View) -> list[_Run]:
        """The most promising runs, best first."""
        runs: list[_Run] = []
        # Comparing data flow is the dear part, so a round stops looking when it has spent its share: the
        # groups come in the order of what they could save, and the next round looks again.
        budget = self.work + _LOOKS * len(view.items)
        covered = np.zeros(len(view.items), bool)
        for _level, starts, lengths in self._groups(view):
            if self.work > budget:
                break
            # The rotations of one repeat are equally good candidates; ``_placed`` chooses.
            if covered[starts].mean() > 0.5:
                continue
            best = _Run(0, [], 0.0)
            # Equal windows of 2**level keys are only where runs begin; the runs are as long as they stay equal.
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

    def _groups(self, view: _View) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Positions with equal windows: those first that could save most."""
        groups: list[tuple[float, int, np.ndarray, np.ndarray]] = []
        for level in range(len(view.ranks)):
            for bound, starts, lengths in view.groups(level, self.model.min_weight):
                if bound >= self.model.min_saving:
                    groups.append((bound, level, starts, lengths))
        # Level and position break ties, so that the result does not depend on the sort.
        groups.sort(key=lambda g: (-g[0], g[1], int(g[2][0])))
        return [(level, starts, lengths) for _, level, starts, lengths in groups[:_CANDIDATES]]

    def _by_data_flow(self, view: _View, length: int, starts: Sequence[int]) -> list[_Run]:
        """Split windows of equal keys into runs whose data flow inside is equal, too."""
        # Occurrences may overlap (in a row of equal keys); the leftmost of each pile-up stays.
        chosen: list[int] = []
        for start in starts:
            if not chosen or start >= chosen[-1] + length:
                chosen.append(start)
        if self._saving(view, chosen, length) < self.model.min_saving:
            return []
        # Equal flow inside is a must: the function computes with it. Which values from outside are the same
        # one may differ between calls, as parameters can be given one value twice (``_with_a_model``).
        classes: dict[Hashable, dict[tuple[int, ...], list[int]]] = {}
        self.work += length * len(chosen)
        for start in chosen:
            inside, outside = view.flow(start, length)
            classes.setdefault(inside, {}).setdefault(outside, []).append(start)
        runs = [
            _Run(length, starts, self._saving(view, starts, length))
            for patterns in classes.values()
            for starts in _with_a_model(patterns)
        ]
        return [run for run in runs if run.saving >= self.model.min_saving]

    def _saving(self, view: _View, starts: Sequence[int], length: int) -> float:
        """What windows at ``starts``, which do not overlap, save as calls of one function."""
        if len(starts) < 2:
            return 0.0
        weight = float(view.weights[starts[0] + length] - view.weights[starts[0]])
        if weight < self.model.min_weight:
            return 0.0
        # A call in the body of a function is compiled once and runs as often as the body does.
        calls = sum(view.times[view.segment_of[start]] for start in starts)
        return (len(starts) - 1) * weight - calls * self.model.per_call

    def _placed(self, view: _View, run: _Run) -> _Run:
        """The rotation of a run that saves most and cuts the fewest values between neighbours."""
        # Layers in a row repeat from any operation of the first layer on. Where the run begins decides which
        # values cross from call to call: a cut inside a softmax hands over what one between layers does not.
        length, first = run.length, run.starts[0]
        # The first and the last occurrence have other neighbours than the rest.
        cuts = view.cuts(run.starts[len(run.starts) // 2], length)
        # each value that is cut is a result of one call and an operand of the next
        price = 2.0 * self.model.per_value
        rotations: list[tuple[float, int, list[int]]] = []
        for shift in range(length):
            # a rotation may win an occurrence before the first, and lose the last
            starts = [s + shift for s in (first - length, *run.starts) if s + shift >= 0]
            same = max(view.classes(np.array(starts), length), key=len, default=[])
            score = self._saving(view, same, length) - price * cuts[shift] * len(same)
            rotations.append((-score, shift, same))
        rotations.sort()
        self.work += length * len(run.starts)
        best, best_score = run, run.saving - price * cuts[0] * len(run.starts)
        # The estimates leave out data flow, which takes occurrences away: looking closely at one that
        # is worse already is not expected to help.
        for estimate, shift, same in rotations[:_PLACES]:
            if -estimate <= best_score:
                break
            for other in self._by_data_flow(view, length, same):
                score = other.saving - price * cuts[shift] * len(other.starts)
                if score > best_score:
                    best, best_score = other, score
        return best

    # -- replacing -------------------------------------------------------------------------------

    def _outline(self, view: _View, run: _Run) -> list[tuple[int, int, Call]]:
        """Make the function of a run, and its calls as (start, end, call)."""
        windows = [view.items[s : s + run.length] for s in run.starts]
        results = self._results(view, run, windows)
        parameters = _parameters(windows)
        # The body is the occurrence that tells all parameters apart.
        model = next(i for i, p in enumerate(parameters) if len(set(p)) == len(p))
        weight = float(view.weights[run.starts[0] + run.length] - view.weights[run.starts[0]])
        flat = [[v for item in window for v in item.results] for window in windows]
        # Values are numbered by the whole sequence: the body keeps the numbers of the occurrence that it is,
        # and calls are told apart by the numbers that they put in place of parameters and results.
        function = Function(
            index=len(self.segments),
            body=list(windows[model]),
            parameters=parameters[model],
            results=tuple(flat[model][i] for i in results),
            weight=weight,
            calls=len(windows),
        )
        self.segments.append(_Segment(function.body, frozenset(function.results), function))
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

    def _results(self, view: _View, run: _Run, windows: Sequence[Sequence[Item]]) -> list[int]:
        """Positions among a window's values that are needed outside of it in some occurrence."""
        # A function has one list of results for all its calls. What one call needs, all return.
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

    def _replace(self, view: _View, replaced: list[tuple[int, int, Call]]) -> None:
        """Put calls where their windows were."""
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


def flat_nodes(items: Iterable[Item]) -> Iterator[Node]:
    """The operations of items, those that calls stand for included."""
    for item in items:
        if isinstance(item, Call):
            yield from item.nodes
        else:
            yield item


def _with_a_model(patterns: dict[tuple[int, ...], list[int]]) -> Iterator[list[int]]:
    """Starts of windows, given by which of the values they read from outside are the same.

    All together where one of them tells apart what any of them does: it can be the body of all.
    """
    # A body that reads one value in two places cannot stand for an occurrence that reads two. Put side by
    # side, the patterns tell apart what any of them does; one that does so by itself is such a body.
    together = tuple(zip(*patterns, strict=True))
    most = max(len(set(p)) for p in patterns)
    if len(set(together)) == most:
        yield sorted(start for starts in patterns.values() for start in starts)
    else:
        yield from patterns.values()


def _parameters(windows: Sequence[Sequence[Item]]) -> list[tuple[int, ...]]:
    """Per window, the values it reads from outside: one parameter per distinct combination."""
    # One column per window, one row per operand from outside. Two rows that are equal in every window are one
    # parameter: calls are given each distinct row once.
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
    """The lengths worth trying for positions that match their predecessors this far: a few."""
    # A length serves all pairs that match at least so far, so it saves about length times those; what is in
    # between two lengths that occur serves no more pairs than the longer of the two.
    counts = Counter(int(n) for n in lengths)
    best = sorted(counts, reverse=True)
    total = 0
    scored: list[tuple[int, int]] = []
    for length in best:
        total += counts[length]
        scored.append((total * length, length))
    scored.sort(reverse=True)
    return [length for _, length in scored[:3]]


class _View:
    """All segments as one sequence of small integers, with the numbering of their windows."""

    def __init__(self, segments: Sequence[_Segment]) -> None:
        self.segments = segments
        self.items: list[Item] = []
        self.offsets: list[int] = []
        self.segment_of: list[int] = []
        symbols: list[int] = []
        numbers: dict[Hashable, int] = {}
        # Each segment ends with a symbol of its own, so that no window spans two of them.
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
        """Per segment, the position of the last item that reads each value."""
        uses: list[dict[int, int]] = [{} for _ in self.segments]
        for position, item in enumerate(self.items):
            last = uses[self.segment_of[position]]
            for value in item.operands:
                last[value] = position
        return uses

    def _times(self) -> list[int]:
        """How often one run of the program runs each segment."""
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
        """For each of ``length`` positions from ``first``: how many values a cut there divides.

        Only values made and read within a distance of ``length`` count: those that one occurrence
        of a repeat hands to the next, not those that are kept for long.
        """
        # A difference array: each value adds one where it begins to be alive and takes it away after its last
        # use; the running sum is how many are alive.
        change = [0] * (2 * length + 1)
        made_at: dict[int, int] = {}
        until: dict[int, int] = {}
        # a value that crosses a cut and is read within ``length`` of its making was made since here
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
        """Whether ``value`` is read at ``end`` or later, or is wanted from the segment."""
        return (
            self.last_use[segment].get(value, -1) >= end or value in self.segments[segment].wanted
        )

    def groups(
        self, level: int, min_weight: float
    ) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """Positions whose windows of 2**level keys are equal.

        Yields an upper bound of what they can save, the positions, and for each but the first how
        long a window it shares with the position before it: at most up to where they would overlap,
        or, where what lies between weighs less than ``min_weight``, several such distances.
        """
        # A stable sort puts equal windows next to each other in the order of their positions, so that each
        # one and the one before it in the sort are neighbouring occurrences.
        ranks = self.ranks[level]
        order = np.argsort(ranks, kind="stable")
        same = ranks[order][1:] == ranks[order][:-1]
        before, after = order[:-1][same], order[1:][same]
        if not len(after):
            return
        gaps = after - before
        # Longer than the gap they would overlap. But where the period is short (a loop of two operations), a
        # run of several periods may be worth a function that one period is not. A call counts as a node here:
        # calls weigh next to nothing however many they are.
        period = np.maximum(self.weights[after] - self.weights[before], gaps)
        periods = np.ceil(min_weight / period).astype(np.int64)
        lengths = np.minimum(self._common(before, after), gaps * periods)
        bounds = self.weights[after + np.minimum(lengths, gaps)] - self.weights[after]
        # A jump among the positions of pairs is where one group of equal windows ends.
        pairs = np.flatnonzero(same)
        first = np.flatnonzero(np.diff(pairs, prepend=-2) > 1)
        totals = np.add.reduceat(bounds, first)
        ends = [*first[1:].tolist(), len(pairs)]
        for begin, end, total in zip(first.tolist(), ends, totals.tolist(), strict=True):
            starts = order[pairs[begin] : pairs[end - 1] + 2]
            yield total, starts, lengths[begin:end]

    def _common(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """How many keys the sequences from ``left`` and from ``right`` (later) share."""
        # From the widest windows to single keys: where windows are equal, both go on behind them. The shared
        # length in binary comes out digit by digit, without looking at each key.
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
        # The last window overlaps the one before where ``length`` is no multiple: windows that cover it all.
        step = 1 << level
        offsets = [*range(0, length - step, step), length - step]
        for start in starts.tolist():
            if start + length <= len(self.items):
                by_content.setdefault(tuple(int(ranks[start + o]) for o in offsets), []).append(
                    start
                )
        return list(by_content.values())

    def flow(self, start: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The data flow of a window: for each operand the position of its value in it, or -1.

        Then, for each operand from outside, the number of its value in order of appearance.
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
        # two windows of ``width`` side by side as one number; below 2**63 for fewer than 3e9 positions
        pairs = ranks[:-width] * (int(ranks.max()) + 1) + ranks[width:]
        unique, numbered = np.unique(pairs, return_inverse=True)
        if len(unique) == len(pairs):
            break  # all windows differ, and so do all longer ones
        levels.append(numbered.astype(np.int64))
        width *= 2
    return levels
