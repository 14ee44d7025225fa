"""Emits a step with its repeats as functions: each is traced once by jax and called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.nodes import Graph, Part, lifts_of
from xla_core.lowering.repeats import Call, Function, Item, Node, Plan

# A lifted number of a call: whether it is a float, and where in the step's vector it is.
_Slot = tuple[bool, int]

KEPT_PREFIX: Final = "xla_repeat_"
"""Functions whose name begins so are kept as functions by the compiler."""


def outlined_function(
    graph: Graph, plan: Plan, outputs: Sequence[int], floats: bool, ints: bool
) -> Callable[..., tuple[Any, ...]]:
    """A jax function of the step: inputs in order, then the lifted floats and ints if there are any."""
    emitter = _Emitter(graph, plan)

    def step(*arrays: Any) -> tuple[Any, ...]:
        count = len(graph.inputs)
        rest = list(arrays[count:])
        ints_vector = rest.pop() if ints else None
        floats_vector = rest.pop() if floats else None
        scope = Scope(graph.lazy | graph.early, Lifted(floats_vector, ints_vector))
        scope.update(zip(graph.inputs, arrays[:count], strict=True))
        emitter.emit(plan.items, scope)
        return tuple(scope[vid] for vid in outputs)

    return step


class _Emitter:
    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.lazy = graph.lazy
        self.slots = _slot_groups(plan)
        self.jitted: dict[Function, Callable[..., Any]] = {}

    def emit(self, items: Sequence[Item], scope: Scope) -> None:
        """Compute items in order."""
        for item in items:
            if isinstance(item, Call):
                self._call(item, scope)
            else:
                scope.compute(item.payload)

    def _call(self, call: Call, scope: Scope) -> None:
        slots = _slots(call)
        kinds = sorted({is_float for is_float, _ in slots})
        vectors = [scope.lifted.vectors[kind] for kind in kinds]
        indices = [self._index(slots[group[0]], scope) for group in self.slots[call.function]]
        operands = [scope[v] for v in call.operands]
        results = self._function(call.function, kinds)(vectors, indices, operands)
        scope.update(zip(call.results, results, strict=True))

    def _index(self, slot: _Slot, scope: Scope) -> Any:
        positions = scope.lifted.positions
        return jax.lax.optimization_barrier(jax.numpy.int32(slot[1])) if positions is None else positions[slot]

    def _function(self, function: Function, kinds: Sequence[bool]) -> Callable[..., Any]:
        found = self.jitted.get(function)
        if found is None:
            def run(vectors: list[Any], indices: list[Any], operands: list[Any]) -> list[Any]:
                of = dict(zip(kinds, vectors, strict=True))
                lifted = Lifted(of.get(True), of.get(False), self._positions(function, indices))
                scope = Scope(self.lazy, lifted)
                scope.update(zip(function.parameters, operands, strict=True))
                self.emit(function.body, scope)
                return [scope[v] for v in function.results]

            run.__name__ = f"{KEPT_PREFIX}{function.index}"
            found = self.jitted[function] = jax.jit(run)
        return found

    def _positions(self, function: Function, indices: Sequence[Any]) -> dict[_Slot, Any]:
        """Where the lifted numbers are that the body reads, from its index arguments."""
        first = [s for item in function.body for s in _item_slots(item)]
        found: dict[_Slot, Any] = {}
        for group, index in zip(self.slots[function], indices, strict=True):
            base = first[group[0]][1]
            for i in group:
                offset = first[i][1] - base
                found[first[i]] = index + np.int32(offset) if offset else index
        return found


def _item_slots(item: Item) -> list[_Slot]:
    parts: list[Part] = [n.payload for n in item.nodes] if isinstance(item, Call) else [item.payload]
    return [(lift.is_float, lift.position) for lift in lifts_of(parts)]


def _slots(call: Call) -> list[_Slot]:
    return [(x.is_float, x.position) for x in lifts_of(n.payload for n in call.nodes)]


def _slot_groups(plan: Plan) -> dict[Function, list[list[int]]]:
    """For each function, its lifted numbers grouped: one index argument serves a group.

    Numbers are in one group when they are equally far apart in all calls of the function.
    """
    calls: dict[Function, list[list[_Slot]]] = {f: [] for f in plan.functions}
    for items in (plan.items, *(f.body for f in plan.functions)):
        for item in items:
            if isinstance(item, Call):
                calls[item.function].append(_slots(item))
    groups: dict[Function, list[list[int]]] = {}
    for function, occurrences in calls.items():
        found: dict[tuple[Any, ...], list[int]] = {}
        first = occurrences[0]
        for i, (is_float, position) in enumerate(first):
            distance = tuple(o[i][1] - position for o in occurrences)
            found.setdefault((is_float, distance), []).append(i)
        groups[function] = list(found.values())
    return groups
