"""Emits a step with its loops, each as one ``lax.scan`` whose body jax traces once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xla_core.lowering.evaluate import Lifted, Scope, graph_function, zeros
from xla_core.lowering.loops.items import (
    Build,
    Carried,
    Element,
    Invariant,
    Lifts,
    Loop,
    Stack,
    Step,
)
from xla_core.lowering.repeat_graph import Graph, lifted_slot
from xla_core.lowering.repeats.items import Node
from xla_core.operators.tensor_meta import TensorMeta


def looped_function(
    graph: Graph,
    steps: Sequence[Step],
    outputs: Sequence[int],
    metas: Mapping[int, TensorMeta | None],
    floats: bool,
    ints: bool,
    scope_class: type[Scope] = Scope,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A jax function of the step: inputs in order, then the lifted floats and ints if there are any.

    ``graph`` has the step's nodes, ``steps`` are they with loops. ``outputs`` are the numbers of the wanted values,
    ``metas`` shapes and dtypes by number; ``floats`` and ``ints`` say which vectors exist. ``scope_class`` computes
    the operations (default: as they were recorded).
    """

    def emit(scope: Scope) -> None:
        _Emitter(graph, metas, scope).emit(steps)

    return graph_function(graph, outputs, floats, ints, scope_class, emit)


class _Emitter:
    def __init__(self, graph: Graph, metas: Mapping[int, TensorMeta | None], scope: Scope) -> None:
        self.graph = graph
        self.metas = metas
        self.scope = scope
        self.stacks: dict[Stack, jax.Array] = {}

    def emit(self, steps: Sequence[Step]) -> None:
        """Compute steps in order."""
        for step in steps:
            if isinstance(step, Node):
                self.scope.compute(step.payload)
            elif isinstance(step, Loop):
                self._loop(step)
            elif isinstance(step, Build):
                self.stacks[step.stack] = jnp.stack([self.scope[v] for v in step.stack.elements])
            else:
                self.scope[step.value] = self.stacks[step.stack][step.index]

    def _loop(self, loop: Loop) -> None:
        scope, body = self.scope, _Body(self, loop)
        carried = {v: s for v, s in loop.sources.items() if isinstance(s, Carried)}
        start = [scope[s.first] for s in carried.values()]
        passed_on = [s.result for s in carried.values()]
        # of what only the last iteration's value is needed, an iteration passes on for no one
        only_last = [v for v in loop.last if v not in passed_on]
        start += map(self._zeros, only_last)

        def iteration(
            state: tuple[jax.Array, list[jax.Array]], _: None
        ) -> tuple[tuple[jax.Array, list[jax.Array]], list[jax.Array]]:
            index, given = state
            inner = body.computed(index, dict(zip(carried, given[: len(carried)], strict=True)))
            following = [inner[v] for v in (*passed_on, *only_last)]
            return (index + 1, following), [inner[v] for v, _ in loop.kept]

        (_, final), kept = jax.lax.scan(iteration, (jnp.int32(0), start), None, length=loop.trips)
        values = dict(zip((*passed_on, *only_last), final, strict=True))
        self.stacks.update(zip((stack for _, stack in loop.kept), kept, strict=True))
        scope.update((outer, values[v]) for v, outer in loop.last.items())

    def _zeros(self, value: int) -> jax.Array:
        meta = self.metas[value]
        assert meta is not None
        return zeros(meta)


class _Body:
    """What all iterations of a loop have in common, and the values of one of them."""

    def __init__(self, emitter: _Emitter, loop: Loop) -> None:
        self.emitter = emitter
        self.loop = loop
        of = loop.sources.items()
        scope = emitter.scope
        self.invariants = {
            v: scope.export_value(s.value)
            for v, s in of
            if isinstance(s, Invariant) and s.value >= 0
        }
        self.elements = {v: s for v, s in of if isinstance(s, Element)}
        self.positions = {
            lifted_slot(v): np.array([lifted_slot(n)[1] for n in s.numbers], np.uint32)
            for v, s in of
            if isinstance(s, Lifts)
        }

    def computed(self, index: jax.Array, carried: Mapping[int, jax.Array]) -> Scope:
        """The scope in which iteration ``index`` has been computed."""
        emitter = self.emitter
        ints, floats = emitter.scope.lifted.vectors
        positions = {slot: _at(jnp.asarray(p), index) for slot, p in self.positions.items()}
        inner = type(emitter.scope)(emitter.graph.lazy, Lifted(floats, ints, positions))
        for value, exported in self.invariants.items():
            inner.import_value(value, exported)
        for value, element in self.elements.items():
            where = element.first + element.step * index
            inner[value] = _at(emitter.stacks[element.stack], where)
        inner.update(carried)
        for node in self.loop.body:
            inner.compute(node.payload)
        return inner


def _at(stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)
