"""Cuts a step with repeats into stages: programs that run one after another, each compiled once.

XLA clones a function for each of its calls and optimizes the clones, so the compile time of one program
grows with the depth of a model even if it has functions. A stage that runs forty-eight times is one program,
however deep the model is. The operations between the calls of functions become stages of their own.

A device may slow down when many runs are pending. It gets fewer stages: each then consists of a few consecutive
calls, provided that these read each other in the same way in all such stages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from jax import Array

from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.outline_functions import Emitter, kinds_of, name_of
from xla_core.lowering.repeat_graph import FILLS, Graph
from xla_core.lowering.repeats.items import Call, Function, Item, Plan
from xla_core.recording.entry import Operation

# XLA clones a function for each call: a stage with more calls than this would take long to compile.
_MOST_CALLS: Final = 8

VECTORS: Final = {True: -1, False: -2}
"""The value numbers of the step's vectors of lifted floats (True) and ints (False)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageProgram:
    """A program that one or more stages run.

    ``function`` takes the arrays of the values ``inputs`` (numbered as in one of its stages, and including vectors
    of numbers), then ``indices`` uint32 scalars, and returns the arrays of ``outputs``. ``aliases`` pairs
    inputs with the outputs that reuse their memory, in every stage.
    """

    name: str
    function: Callable[..., Sequence[object]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    indices: int
    aliases: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One run of a program: the values that it takes and makes, and the scalar arguments ``indices``."""

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
        """The values whose memory a result reuses."""
        aliases = [program.aliases for program in self.programs]
        return {stage.inputs[i] for stage in self.stages for i, _ in aliases[stage.program]}


def cut(
    graph: Graph,
    plan: Plan,
    outputs: Sequence[int],
    donations: Mapping[int, int],
    most_stages: int | None = None,
) -> StagePlan:
    """The stages of a step.

    ``graph`` and ``plan`` are its nodes and repeats, ``outputs`` the numbers of the wanted values.
    ``donations`` maps inputs to the outputs that their storages hold afterwards. If there would be more than
    ``most_stages`` stages (default: no limit), consecutive calls share one.
    """
    return _Cutter(graph, plan, outputs, donations, most_stages).plan()


class _Cutter:
    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        outputs: Sequence[int],
        donations: Mapping[int, int],
        most_stages: int | None,
    ) -> None:
        self.graph = graph
        self.emitter = Emitter(graph, plan)
        self.outputs = outputs
        self.donations = donations
        self.groups = list(_groups(plan.items, _calls_per_stage(plan, most_stages)))
        self.computed = {v for group in self.groups for item in group for v in item.results}
        self.last_reader: dict[int, int] = {}

    def plan(self) -> StagePlan:
        reads = [_reads(group) for group in self.groups]
        first = self._first(itertools.chain(*reads, self.outputs))
        # Later stages overwrite earlier ones, which leaves the last reader. The step's results are read after
        # all stages, so no stage may reuse their memory.
        for number, values in enumerate(reads, start=1):
            self.last_reader.update(dict.fromkeys(values, number))
        self.last_reader.update(dict.fromkeys(self.outputs, len(reads) + 1))
        leaving = self._leaving_calls()
        stages: list[Stage] = []
        programs: list[StageProgram] = []
        program_of: dict[Hashable, int] = {}
        for number, (group, values) in enumerate(zip(self.groups, reads, strict=True), start=1):
            key: Hashable = number  # operations between calls are a different program each time
            calls = _calls(group)
            if calls:
                key = _wiring(calls)
                stage = self._of_calls(calls, leaving[key])
            else:
                stage = self._between(group, values, number)
            if key not in program_of:
                program_of[key] = len(programs)
                programs.append(self._program(group, stage))
            stages.append(dataclasses.replace(stage, program=program_of[key]))
        programs = self._with_aliases(programs, stages)
        # It runs first, but is last among the programs, so that the numbers assigned above remain valid.
        if first is not None:
            stages.insert(0, Stage(len(programs), first.inputs, (), first.outputs))
            programs.append(first)
        return StagePlan(tuple(programs), tuple(stages))

    def _first(self, read: Iterable[int]) -> StageProgram | None:
        """The program that computes the slices of inputs that stages read, and constants that are results."""
        graph = self.graph
        lazy = graph.lazy | graph.early
        wanted = tuple(v for v in dict.fromkeys(read) if v in lazy and v not in self.computed)
        if not wanted:
            return None
        inputs = tuple(_given(wanted, lazy))

        def function(*arrays: Array) -> list[Array]:
            scope = Scope(lazy, Lifted(None, None))
            scope.update(zip(inputs, arrays, strict=True))
            return [scope[v] for v in wanted]

        return StageProgram("slices_and_constants", function, inputs, wanted, 0, ())

    def _leaving_calls(self) -> dict[Hashable, list[int]]:
        """For each wiring, the results that any group of calls with this wiring passes on to later stages."""
        # One program serves all groups with the same wiring, so it returns what any of them passes on. If a
        # group passes on less, its schedule drops the rest.
        leaving: dict[Hashable, set[int]] = {}
        for number, group in enumerate(self.groups, start=1):
            calls = _calls(group)
            if calls:
                results = enumerate(v for call in calls for v in call.results)
                read_later = {i for i, v in results if self.last_reader.get(v, 0) > number}
                leaving.setdefault(_wiring(calls), set()).update(read_later)
        return {wiring: sorted(places) for wiring, places in leaving.items()}

    def _of_calls(self, calls: list[Call], leaving: list[int]) -> Stage:
        results = [v for call in calls for v in call.results]
        inner = set(results)
        values = (v for call in calls for v in call.operands if v >= 0 and v not in inner)
        vectors = (VECTORS[kind] for kind in kinds_of(calls[0].operands))
        # Numbers that differ from call to call are in one vector of the step. Each stage gets the positions of
        # its numbers as arguments, because constants would make a program for each stage.
        moving = (slot for call in calls for slot in self.emitter.moving_slots(call))
        indices = tuple(position for _, position in moving)
        return Stage(-1, (*values, *vectors), indices, tuple(results[i] for i in leaving))

    def _between(self, group: list[Item], values: Iterable[int], number: int) -> Stage:
        numbers = [v for item in group for v in item.operands if v < 0]
        results = dict.fromkeys(v for item in group for v in item.results)
        outputs = tuple(v for v in results if self.last_reader.get(v, 0) > number)
        return Stage(-1, (*values, *(VECTORS[kind] for kind in kinds_of(numbers))), (), outputs)

    def _program(self, group: list[Item], stage: Stage) -> StageProgram:
        values = [v for v in stage.inputs if v >= 0]
        kinds = [kind for kind in (False, True) if VECTORS[kind] in stage.inputs]
        calls = _calls(group)
        if calls:
            body, name = self._calls_body(calls, stage.outputs), name_of(calls[0].function)
            name = f"{len(calls)}_times_{name}" if len(calls) > 1 else name
        else:
            body, name = self._body(group, values, kinds, stage.outputs), f"{len(group)}_operations"
        vectors, count = len(kinds), len(values)

        def function(*arrays: Array) -> list[Array]:
            operands, rest = list(arrays[:count]), list(arrays[count:])
            return body(rest[:vectors], rest[vectors:], operands)

        return StageProgram(name, function, stage.inputs, stage.outputs, len(stage.indices), ())

    def _calls_body(
        self, calls: list[Call], outputs: tuple[int, ...]
    ) -> Callable[[list[Array], list[Array], list[Array]], list[Array]]:
        function = calls[0].function
        # a function that is called once is inlined
        emitter = self.emitter
        run_one = (
            emitter.body(function)
            if len(calls) == 1
            else functools.partial(emitter.run_kept, function)
        )

        def run(vectors: list[Array], indices: list[Array], operands: list[Array]) -> list[Array]:
            # A value that one call passes to another in the same stage is not an argument of the program.
            computed: dict[int, Array] = {}
            given, moving = iter(operands), iter(indices)
            for call in calls:
                own = [
                    computed[v] if v in computed else next(given) for v in call.operands if v >= 0
                ]
                numbers = [next(moving) for _ in emitter.moving_slots(call)]
                computed.update(zip(call.results, run_one(vectors, numbers, own), strict=True))
            return [computed[v] for v in outputs]

        return run

    def _body(
        self, group: list[Item], values: list[int], kinds: list[bool], outputs: tuple[int, ...]
    ) -> Callable[[list[Array], list[Array], list[Array]], list[Array]]:
        def run(vectors: list[Array], _indices: list[Array], operands: list[Array]) -> list[Array]:
            of = dict(zip(kinds, vectors, strict=True))
            scope = Scope(self.graph.lazy, Lifted(of.get(True), of.get(False)))
            scope.update(zip(values, operands, strict=True))
            self.emitter.emit(group, scope)
            return [scope[v] for v in outputs]

        return run

    def _with_aliases(
        self, programs: list[StageProgram], stages: list[Stage]
    ) -> list[StageProgram]:
        """Donate an input if every stage of a program is its last reader and makes the value that replaces it."""
        common: dict[int, set[tuple[int, int]]] = {}
        for number, stage in enumerate(stages, start=1):
            aliases = set(self._aliases(stage, number))
            # Donation is part of the program: a stage after which the input is still needed rules it out for all.
            common[stage.program] = common.get(stage.program, aliases) & aliases
        return [
            dataclasses.replace(p, aliases=tuple(sorted(common[i]))) for i, p in enumerate(programs)
        ]

    def _aliases(self, stage: Stage, number: int) -> Iterator[tuple[int, int]]:
        times = Counter(stage.inputs)
        places = {v: i for i, v in enumerate(stage.outputs)}
        for i, value in enumerate(stage.inputs):
            successor = places.get(self.donations.get(value, -1))
            # If it were passed twice, one buffer would be donated and read in the same run, which PJRT refuses.
            if successor is not None and times[value] == 1 and self.last_reader[value] == number:
                yield i, successor


def stage_count(plan: Plan) -> int:
    """The number of stages with one for each call, not counting the one for slices of inputs and constants."""
    return sum(1 for _ in _groups(plan.items, lambda _: 1))


def _groups(items: Sequence[Item], per_stage: Callable[[int], int]) -> Iterator[list[Item]]:
    """Groups of consecutive calls of one function, and groups of the operations between calls.

    ``per_stage`` maps a number of consecutive calls to the number of calls in a group.
    """
    for function, run in itertools.groupby(items, _function_of):
        row = list(run)
        size = len(row) if function is None else per_stage(len(row))
        yield from (row[i : i + size] for i in range(0, len(row), size))


def _function_of(item: Item) -> Function | None:
    return item.function if isinstance(item, Call) else None


def _calls_per_stage(plan: Plan, most_stages: int | None) -> Callable[[int], int]:
    """A function from a number of consecutive calls to how many of them share a stage.

    There are then at most ``most_stages`` stages. A divisor is preferred, because a remainder would be
    another program to compile.
    """
    count = stage_count(plan)
    fewest = 1 if most_stages is None else min(math.ceil(count / most_stages), _MOST_CALLS)

    def per_stage(calls: int) -> int:
        even = (n for n in range(fewest, min(2 * fewest, _MOST_CALLS) + 1) if calls % n == 0)
        return next(even, fewest)

    return per_stage


def _calls(group: Sequence[Item]) -> list[Call]:
    """The calls that a group consists of; empty if it has the operations between calls."""
    return [item for item in group if isinstance(item, Call)]


def _wiring(calls: Sequence[Call]) -> Hashable:
    """What groups of calls with the same program have in common: their number, and how they read each other."""
    places = {v: i for i, v in enumerate(v for call in calls for v in call.results)}
    operands = (v for call in calls for v in call.operands if v >= 0)
    return calls[0].function, len(calls), tuple(places.get(v, -1) for v in operands)


def _reads(group: Iterable[Item]) -> list[int]:
    """The values that a group reads but does not make, in order."""
    computed: set[int] = set()
    read: dict[int, None] = {}
    for item in group:
        read.update(dict.fromkeys(v for v in item.operands if v >= 0 and v not in computed))
        computed.update(item.results)
    return list(read)


def _given(wanted: Iterable[int], lazy: Mapping[int, Operation]) -> Iterator[int]:
    """The program inputs from which lazy values are made; a fill reads only the shape of its operand."""
    pending, seen = list(wanted), set[int]()
    while pending:
        value = pending.pop()
        if value in seen:
            continue  # chains of views share beginnings: without this the walk would take exponential time
        seen.add(value)
        entry = lazy.get(value)
        if entry is None:
            yield value
        elif entry.plan.name not in FILLS:
            pending += (ref.vid for ref in entry.references())
