"""Emits a step with its repeats as functions: each is traced once by jax and called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.nodes import Graph, lifted_slot
from xla_core.lowering.repeats import Call, Function, Item, Plan, flat_nodes

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
        self.groups = _moving_groups(plan)
        self.jitted: dict[Function, Callable[..., Any]] = {}

    def emit(self, items: Sequence[Item], scope: Scope) -> None:
        """Compute items in order."""
        for item in items:
            if isinstance(item, Call):
                self._call(item, scope)
            else:
                scope.compute(item.payload)

    def _call(self, call: Call, scope: Scope) -> None:
        function = call.function
        slots = _slots(call.operands)
        kinds = sorted({is_float for is_float, _ in slots})
        vectors = [scope.lifted.vectors[kind] for kind in kinds]
        indices = [_index(slots[group[0]], scope) for group in self.groups[function]]
        operands = [scope[v] for v in call.operands if v >= 0]
        results = self._function(function, kinds)(vectors, indices, operands)
        scope.update(zip(call.results, results, strict=True))

    def _function(self, function: Function, kinds: Sequence[bool]) -> Callable[..., Any]:
        found = self.jitted.get(function)
        if found is None:
            parameters = [v for v in function.parameters if v >= 0]

            def run(vectors: list[Any], indices: list[Any], operands: list[Any]) -> list[Any]:
                of = dict(zip(kinds, vectors, strict=True))
                lifted = Lifted(of.get(True), of.get(False), self._positions(function, indices))
                scope = Scope(self.lazy, lifted)
                scope.update(zip(parameters, operands, strict=True))
                self.emit(function.body, scope)
                return [scope[v] for v in function.results]

            run.__name__ = _name(function)
            found = self.jitted[function] = jax.jit(run)
        return found

    def _positions(self, function: Function, indices: Sequence[Any]) -> dict[_Slot, Any]:
        """Where the lifted numbers are that the body reads, from its index arguments."""
        slots = _slots(function.parameters)
        found: dict[_Slot, Any] = {}
        for group, index in zip(self.groups[function], indices, strict=True):
            base = slots[group[0]][1]
            for member in group:
                offset = slots[member][1] - base
                found[slots[member]] = index + np.uint32(offset) if offset else index
        return found


def _slots(values: Sequence[int]) -> list[_Slot]:
    """The lifted numbers among operands or parameters."""
    return [lifted_slot(v) for v in values if v < 0]


def _moving_groups(plan: Plan) -> dict[Function, list[list[int]]]:
    """For each function, its lifted numbers that are elsewhere in another call, in groups.

    Those of a group are equally far apart in all calls: one index argument serves them.
    """
    calls: dict[Function, list[list[_Slot]]] = {f: [] for f in plan.functions}
    for items in (plan.items, *(f.body for f in plan.functions)):
        for item in items:
            if isinstance(item, Call):
                calls[item.function].append(_slots(item.operands))
    groups: dict[Function, list[list[int]]] = {}
    for function, occurrences in calls.items():
        found: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
        for i, (is_float, position) in enumerate(_slots(function.parameters)):
            distance = tuple(o[i][1] - position for o in occurrences)
            if any(distance):
                found.setdefault((is_float, distance), []).append(i)
        groups[function] = list(found.values())
    return groups


def _name(function: Function) -> str:
    """For people who read dumps: the operations from which to which, and how many."""
    nodes = list(flat_nodes(function.body))
    ends = (nodes[0].payload.entry.plan.name, nodes[-1].payload.entry.plan.name)
    first, last = (name.replace("put:aten.", "put_aten.").split(".")[1] for name in ends)
    return f"{KEPT_PREFIX}{function.index}_{first}_to_{last}_{len(nodes)}_operations"


def _index(slot: _Slot, scope: Scope) -> Any:
    position = scope.lifted.positions.get(slot)
    if position is not None:
        return position
    # Where XLA sees the constant it makes every call's kernels another: they would all be compiled.
    return jax.lax.optimization_barrier(jnp.uint32(slot[1]))
