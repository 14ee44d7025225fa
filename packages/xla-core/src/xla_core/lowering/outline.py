"""Emits a step with its repeats as functions: each is traced once by jax and called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.nodes import Graph, lifts_of
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
        moving = [group for group in self.slots[call.function] if group.moves]
        indices = [_index(slots[group.members[0]], scope) for group in moving]
        operands = [scope[v] for v in call.operands]
        results = self._function(call.function, kinds)(vectors, indices, operands)
        scope.update(zip(call.results, results, strict=True))

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
        first = [slot for item in function.body for slot in _item_slots(item)]
        found: dict[_Slot, Any] = {}
        moving = (group for group in self.slots[function] if group.moves)
        for group, index in zip(moving, indices, strict=True):
            base = first[group.members[0]][1]
            for member in group.members:
                offset = first[member][1] - base
                found[first[member]] = index + np.uint32(offset) if offset else index
        return found


def _index(slot: _Slot, scope: Scope) -> Any:
    position = scope.lifted.positions.get(slot)
    if position is not None:
        return position
    # Where XLA sees the constant it makes every call's kernels another: they would all be compiled.
    return jax.lax.optimization_barrier(jnp.uint32(slot[1]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Lifted numbers of a function that are equally far apart in all its calls.

    One index argument serves them all, or none if their positions are the same in all calls.
    """

    members: list[int]
    moves: bool


def _item_slots(item: Item) -> list[_Slot]:
    return _slots(item) if isinstance(item, Call) else _node_slots([item])


def _slots(call: Call) -> list[_Slot]:
    return _node_slots(call.nodes)


def _node_slots(nodes: Iterable[Node]) -> list[_Slot]:
    return [(lift.is_float, lift.position) for lift in lifts_of(n.payload for n in nodes)]


def _slot_groups(plan: Plan) -> dict[Function, list[_Group]]:
    """The groups of every function's lifted numbers."""
    calls: dict[Function, list[list[_Slot]]] = {f: [] for f in plan.functions}
    for items in (plan.items, *(f.body for f in plan.functions)):
        for item in items:
            if isinstance(item, Call):
                calls[item.function].append(_slots(item))
    groups: dict[Function, list[_Group]] = {}
    for function, occurrences in calls.items():
        found: dict[tuple[Any, ...], list[int]] = {}
        for i, (is_float, position) in enumerate(occurrences[0]):
            distance = tuple(o[i][1] - position for o in occurrences)
            found.setdefault((is_float, distance), []).append(i)
        groups[function] = [_Group(m, any(key[1])) for key, m in found.items()]
    return groups
