"""Cuts a step with repeats into stages: programs that run in a row, each compiled once.

XLA clones a function for each of its calls and optimizes the clones: the compile time of one program
grows with a model's depth, functions or not. A stage that runs forty-eight times is one program
however deep the model is. What lies between the calls of functions become stages of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.nodes import Graph, references
from xla_core.lowering.outline import Emitter, kinds_of, name_of
from xla_core.lowering.repeats import Call, Function, Item, Plan
from xla_core.trace import Entry

VECTORS: Final = {True: -1, False: -2}
"""The value numbers of the step's vectors of lifted floats (True) and ints (False)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageProgram:
    """A program of one or more stages.

    ``function`` takes arrays of the values ``inputs`` (of one of its stages; vectors of numbers
    among them), then ``indices`` uint32 scalars, and gives those of ``outputs``. ``aliases`` pairs
    inputs with the outputs that take over their memory, in every stage.
    """

    name: str
    function: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    indices: int
    aliases: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One run of a program: which values it takes and makes; ``indices`` are numbers given as such."""

    program: int
    inputs: tuple[int, ...]
    indices: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """A step as stages, in order."""

    programs: tuple[StageProgram, ...]
    stages: tuple[Stage, ...]

    def donated(self) -> set[int]:
        """The values whose memory is taken over by a result."""
        aliases = [program.aliases for program in self.programs]
        return {stage.inputs[i] for stage in self.stages for i, _ in aliases[stage.program]}


def cut(
    graph: Graph, plan: Plan, outputs: Sequence[int], donations: Mapping[int, int]
) -> StagePlan:
    """The stages of a step; ``donations`` maps inputs to the outputs that their storages hold then."""
    return _Cutter(graph, plan, outputs, donations).plan()


class _Cutter:
    def __init__(
        self, graph: Graph, plan: Plan, outputs: Sequence[int], donations: Mapping[int, int]
    ) -> None:
        self.graph = graph
        self.emitter = Emitter(graph, plan)
        self.outputs = outputs
        self.donations = donations
        self.groups = [list(g) for g in _groups(plan.items)]
        self.made = {v for group in self.groups for item in group for v in item.results}
        self.last_reader: dict[int, int] = {}

    def plan(self) -> StagePlan:
        reads = [_reads(group) for group in self.groups]
        first = self._first(itertools.chain(*reads, self.outputs))
        for number, values in enumerate(reads, start=1):
            self.last_reader.update(dict.fromkeys(values, number))
        self.last_reader.update(dict.fromkeys(self.outputs, len(reads) + 1))
        stages: list[Stage] = []
        programs: list[StageProgram] = []
        of: dict[Function | int, int] = {}
        for number, (group, values) in enumerate(zip(self.groups, reads, strict=True), start=1):
            head = group[0]
            key: Function | int = number
            if isinstance(head, Call):
                stage, key = self._of_call(head), head.function
            else:
                stage = self._between(group, values, number)
            if key not in of:
                of[key] = len(programs)
                programs.append(self._program(group, stage))
            stages.append(dataclasses.replace(stage, program=of[key]))
        programs = self._with_aliases(programs, stages)
        if first is not None:
            stages.insert(0, Stage(len(programs), first.inputs, (), first.outputs))
            programs.append(first)
        return StagePlan(tuple(programs), tuple(stages))

    def _first(self, read: Iterable[int]) -> StageProgram | None:
        """What computes the slices of inputs that stages read, and constants that are results."""
        graph = self.graph
        lazy = graph.lazy | graph.early
        wanted = tuple(v for v in dict.fromkeys(read) if v in lazy and v not in self.made)
        if not wanted:
            return None
        inputs = tuple(_given(wanted, lazy))

        def function(*arrays: Any) -> list[Any]:
            scope = Scope(lazy, Lifted(None, None))
            scope.update(zip(inputs, arrays, strict=True))
            return [scope[v] for v in wanted]

        return StageProgram("slices_and_constants", function, inputs, wanted, 0, ())

    def _of_call(self, call: Call) -> Stage:
        values = (v for v in call.operands if v >= 0)
        vectors = (VECTORS[kind] for kind in kinds_of(call.operands))
        indices = tuple(position for _, position in self.emitter.moving_slots(call))
        return Stage(-1, (*values, *vectors), indices, call.results)

    def _between(self, group: list[Item], values: Iterable[int], number: int) -> Stage:
        numbers = [v for item in group for v in item.operands if v < 0]
        made = dict.fromkeys(v for item in group for v in item.results)
        outputs = tuple(v for v in made if self.last_reader.get(v, 0) > number)
        return Stage(-1, (*values, *(VECTORS[kind] for kind in kinds_of(numbers))), (), outputs)

    def _program(self, group: list[Item], stage: Stage) -> StageProgram:
        values = [v for v in stage.inputs if v >= 0]
        kinds = [kind for kind in (False, True) if VECTORS[kind] in stage.inputs]
        head = group[0]
        if isinstance(head, Call):
            body, name = self.emitter.body(head.function), name_of(head.function)
        else:
            body, name = self._body(group, values, kinds, stage.outputs), f"{len(group)}_operations"
        vectors, count = len(kinds), len(values)

        def function(*arrays: Any) -> list[Any]:
            operands, rest = list(arrays[:count]), list(arrays[count:])
            return body(rest[:vectors], rest[vectors:], operands)

        return StageProgram(name, function, stage.inputs, stage.outputs, len(stage.indices), ())

    def _body(
        self, group: list[Item], values: list[int], kinds: list[bool], outputs: tuple[int, ...]
    ) -> Callable[[list[Any], list[Any], list[Any]], list[Any]]:
        def run(vectors: list[Any], _indices: list[Any], operands: list[Any]) -> list[Any]:
            of = dict(zip(kinds, vectors, strict=True))
            scope = Scope(self.graph.lazy, Lifted(of.get(True), of.get(False)))
            scope.update(zip(values, operands, strict=True))
            self.emitter.emit(group, scope)
            return [scope[v] for v in outputs]

        return run

    def _with_aliases(
        self, programs: list[StageProgram], stages: list[Stage]
    ) -> list[StageProgram]:
        """Donate where every stage of a program is the last to read a donated input, and makes its heir."""
        common: dict[int, set[tuple[int, int]]] = {}
        for number, stage in enumerate(stages, start=1):
            found = set(self._aliases(stage, number))
            common[stage.program] = common.get(stage.program, found) & found
        return [
            dataclasses.replace(p, aliases=tuple(sorted(common[i]))) for i, p in enumerate(programs)
        ]

    def _aliases(self, stage: Stage, number: int) -> Iterator[tuple[int, int]]:
        times = Counter(stage.inputs)
        places = {v: i for i, v in enumerate(stage.outputs)}
        for i, value in enumerate(stage.inputs):
            heir = places.get(self.donations.get(value, -1))
            if heir is not None and times[value] == 1 and self.last_reader[value] == number:
                yield i, heir


def stage_count(plan: Plan) -> int:
    """How many stages a plan gives, but for slices of inputs and constants."""
    return sum(1 for _ in _groups(plan.items))


def _groups(items: Sequence[Item]) -> Iterator[Iterable[Item]]:
    """Each call alone, and the operations between two calls together."""
    for is_call, found in itertools.groupby(items, lambda item: isinstance(item, Call)):
        if is_call:
            yield from ([call] for call in found)
        else:
            yield found


def _reads(group: Iterable[Item]) -> list[int]:
    """The values that a group reads and does not make, in order."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for item in group:
        found.update(dict.fromkeys(v for v in item.operands if v >= 0 and v not in made))
        made.update(item.results)
    return list(found)


def _given(wanted: Iterable[int], lazy: Mapping[int, Entry]) -> Iterator[int]:
    """The program inputs that lazy values are made of."""
    pending, seen = list(wanted), set[int]()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        entry = lazy.get(value)
        if entry is None:
            yield value
        elif entry.plan is not None:
            pending += (r.vid for r in references((entry.args, tuple(entry.kwargs.values()))))
