"""Emits a step with its repeats as functions, which jax traces once and then calls.

Three things differ between the calls of one function: its values, the lifted numbers that it
reads, and (in a partitioned program) the forms of its values. Values are operands. Numbers are read from the
step's vectors at indices that are also operands. For each combination of forms, the function is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_core.lowering.evaluate import PLAIN, Exported, Lifted, Scope, graph_function
from xla_core.lowering.repeat_graph import Graph, lifted_slot
from xla_core.lowering.repeats.items import Call, Function, Item, Plan, flat_nodes
from xla_core.lowering.source_scopes import common_scope

# A lifted number of a call: whether it is a float, and its position in the step's vector.
Slot = tuple[bool, int]

# A function under ``jax.jit``. Tracing fills the list: for each result its place among the function's arguments
# and the values that it returns, and its form.
_Traced = tuple[Callable[..., list[jax.Array]], list[tuple[int, str]]]

KEPT_PREFIX: Final = "xla_repeat_"
"""The compiler does not inline functions whose names begin with this."""


def outlined_function(
    graph: Graph,
    plan: Plan,
    outputs: Sequence[int],
    floats: bool,
    ints: bool,
    scope_class: type[Scope] = Scope,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A jax function of the step: inputs in order, then the lifted floats and ints if there are any.

    ``graph`` and ``plan`` are the step's nodes and its repeats, ``outputs`` the numbers of the wanted values;
    ``floats`` and ``ints`` say which vectors exist. ``scope_class`` computes the operations (default: as
    they were recorded).
    """
    emitter = Emitter(graph, plan, scope_class)
    return graph_function(
        graph, outputs, floats, ints, scope_class, lambda scope: emitter.emit(plan.items, scope)
    )


class Emitter:
    """Replays the items of a plan under jax, tracing each function once.

    ``groups`` has, for each function, the lifted numbers whose positions differ between calls.
    """

    def __init__(self, graph: Graph, plan: Plan, scope_class: type[Scope] = Scope) -> None:
        self.lazy = graph.lazy
        self.scope_class = scope_class
        self.groups = _moving_groups(plan)
        self._traced: dict[object, _Traced] = {}

    def emit(self, items: Sequence[Item], scope: Scope) -> None:
        """Compute items in order."""
        for item in items:
            if isinstance(item, Call):
                self._call(item, scope)
            else:
                scope.compute(item.payload)

    def _call(self, call: Call, scope: Scope) -> None:
        function = call.function
        vectors = [scope.lifted.vectors[kind] for kind in kinds_of(call.operands)]
        indices = [_index(slot, scope) for slot in self.moving_slots(call)]
        operands = [scope.export_value(v) for v in call.operands if v >= 0]
        results = self._run(function, vectors, indices, operands)
        for vid, result in zip(call.results, results, strict=True):
            scope.import_value(vid, result)

    def moving_slots(self, call: Call) -> list[Slot]:
        """For each group of its function's moving numbers, the position of the group's first one in this call."""
        of_call = slots(call.operands)
        return [of_call[group[0]] for group in self.groups[call.function]]

    def run_kept(
        self,
        function: Function,
        vectors: list[jax.Array],
        indices: list[jax.Array],
        operands: list[jax.Array],
    ) -> list[object]:
        """Call a function that the compiler keeps as a function.

        ``vectors`` and ``indices`` are those of ``body``. ``operands`` and results are plain values. ``_run``
        says how often it is traced.
        """
        given = [(operand, PLAIN) for operand in operands]
        return [array for array, _ in self._run(function, vectors, indices, given)]

    def _run(
        self,
        function: Function,
        vectors: list[jax.Array],
        indices: list[jax.Array],
        operands: list[Exported],
    ) -> list[Exported]:
        """Call a function, which is traced once for each combination of equal operands and of operands' forms.

        An operand that occurs twice is passed once, and a result that equals an operand or another result
        is not returned: a call must not have two names for one value (see ``call_alias_check``).
        """
        # In calls with equal patterns the same operands coincide, so one trace fits all of them.
        given, pattern = _distinct([array for array, _ in operands])
        key = (function, pattern, tuple(form for _, form in operands))
        traced = self._traced.get(key)
        if traced is None:
            traced = self._traced[key] = self._trace(*key)
        jitted, results = traced
        computed = jitted(vectors, indices, given)
        values = [*given, *computed]
        return [(values[place], form) for place, form in results]

    def _trace(
        self, function: Function, pattern: tuple[int, ...], forms: tuple[str, ...]
    ) -> _Traced:
        body = self._body(function)
        results: list[tuple[int, str]] = []

        def run(
            vectors: list[jax.Array], indices: list[jax.Array], given: list[jax.Array]
        ) -> list[jax.Array]:
            operands = [(given[place], form) for place, form in zip(pattern, forms, strict=True)]
            computed = body(vectors, indices, operands)
            # jax runs this when it traces the first call; ``results`` is filled when that call returns.
            values, places = _distinct([*given, *(array for array, _ in computed)])
            results[:] = zip(places[len(given) :], (form for _, form in computed), strict=True)
            return values[len(given) :]

        run.__name__ = KEPT_PREFIX + name_of(function)
        return jax.jit(run), results

    def body(
        self, function: Function
    ) -> Callable[[list[jax.Array], list[jax.Array], list[jax.Array]], list[jax.Array]]:
        """A Python function that computes a function's results from vectors of numbers, indices, and operands.

        The vectors are those that ``kinds_of`` lists for its parameters. The indices are the positions of the
        first number of each group of its moving numbers.
        """
        body = self._body(function)

        def run(
            vectors: list[jax.Array], indices: list[jax.Array], operands: list[jax.Array]
        ) -> list[jax.Array]:
            results = body(vectors, indices, [(operand, PLAIN) for operand in operands])
            return [array for array, _ in results]

        return run

    def _body(
        self, function: Function
    ) -> Callable[[list[jax.Array], list[jax.Array], list[Exported]], list[Exported]]:
        """Like ``body``, for operands and results in the forms of their scopes."""
        parameters = [v for v in function.parameters if v >= 0]
        kinds = kinds_of(function.parameters)

        def run(
            vectors: list[jax.Array], indices: list[jax.Array], operands: list[Exported]
        ) -> list[Exported]:
            of = dict(zip(kinds, vectors, strict=True))
            lifted = Lifted(of.get(True), of.get(False), self._positions(function, indices))
            scope = self.scope_class(self.lazy, lifted)
            for vid, operand in zip(parameters, operands, strict=True):
                scope.import_value(vid, operand)
            self.emit(function.body, scope)
            return [scope.export_value(v) for v in function.results]

        return run

    def _positions(self, function: Function, indices: Sequence[jax.Array]) -> dict[Slot, jax.Array]:
        """The positions of the lifted numbers that the body reads, computed from its index arguments."""
        # The body comes from one place of the step, and refers to numbers by their positions there. Numbers that
        # have the same position in all calls are in no group, and are read from that position.
        places = slots(function.parameters)
        positions: dict[Slot, jax.Array] = {}
        for group, index in zip(self.groups[function], indices, strict=True):
            # one index serves the group: its members have the same distances in all calls
            base = places[group[0]][1]
            for member in group:
                # may be negative: operations on several tensors are split, and their parts are in another order
                offset = places[member][1] - base
                positions[places[member]] = (
                    index + np.uint32(offset) if offset >= 0 else index - np.uint32(-offset)
                )
        return positions


def _distinct(values: Sequence[jax.Array]) -> tuple[list[jax.Array], tuple[int, ...]]:
    """Each distinct value once, in order, and the place of each of ``values`` among these."""
    by_identity = {id(v): v for v in values}
    places = {number: i for i, number in enumerate(by_identity)}
    return list(by_identity.values()), tuple(places[id(v)] for v in values)


def slots(values: Sequence[int]) -> list[Slot]:
    """The lifted numbers among operands or parameters."""
    return [lifted_slot(v) for v in values if v < 0]


def kinds_of(values: Sequence[int]) -> list[bool]:
    """The vectors that hold the lifted numbers of operands or parameters: ints (False), floats (True)."""
    return sorted({is_float for is_float, _ in slots(values)})


def _moving_groups(plan: Plan) -> dict[Function, list[list[int]]]:
    """For each function, groups of its lifted numbers whose positions differ between calls.

    The members of a group have the same distances in all calls, so that one index argument serves them.
    """
    calls: dict[Function, list[list[Slot]]] = {f: [] for f in plan.functions}
    for items in (plan.items, *(f.body for f in plan.functions)):
        for item in items:
            if isinstance(item, Call):
                calls[item.function].append(slots(item.operands))
    groups: dict[Function, list[list[int]]] = {}
    for function, occurrences in calls.items():
        by_distance: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
        for i, (is_float, position) in enumerate(slots(function.parameters)):
            # the distance between the number's position in each call and in the body
            distance = tuple(o[i][1] - position for o in occurrences)
            if any(distance):
                by_distance.setdefault((is_float, distance), []).append(i)
        groups[function] = list(by_distance.values())
    return groups


def name_of(function: Function) -> str:
    """A name for readers of dumps: module, first and last operation, and the number of operations.

    The module is included if operations are located (``xla_core.recording.source_location``).
    """
    nodes = list(flat_nodes(function.body))
    ends = (nodes[0].payload.entry.plan.name, nodes[-1].payload.entry.plan.name)
    first, last = (name.replace("put:aten.", "put_aten.").split(".")[1] for name in ends)
    scope = common_scope(node.payload.entry for node in nodes)
    module = f"{scope}_" if scope else ""
    return f"{function.index}_{module}{first}_to_{last}_{len(nodes)}_operations"


def _index(slot: Slot, scope: Scope) -> jax.Array:
    position = scope.lifted.positions.get(slot)
    if position is not None:
        return position
    # If XLA saw the constant, the kernels of every call would differ, and all would be compiled.
    return jax.lax.optimization_barrier(jnp.uint32(slot[1]))
