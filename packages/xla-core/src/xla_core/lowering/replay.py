"""Makes a jax function of a recorded step, which replays its entries through the lowering rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from jax import Array

from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.loops.items import Step
from xla_core.lowering.loops.search import find_loops
from xla_core.lowering.loops.wiring import Draft
from xla_core.lowering.repeat_graph import Graph, OpInstance, build_graph, most_weight
from xla_core.lowering.repeats.items import CostModel, Node, Plan
from xla_core.lowering.repeats.search import find_repeats
from xla_core.operators.lowering_registry import Rule
from xla_core.recording.entry import Entry, Input, inputs_of, operations_of


def needed_entries(entries: Sequence[Entry], outputs: Sequence[int]) -> list[Entry]:
    """The entries that the outputs depend on, in program order; inputs are always kept."""
    wanted = set(outputs)
    kept: list[Entry] = []
    for entry in reversed(entries):
        if isinstance(entry, Input):
            kept.append(entry)
        elif any(vid in wanted for vid in range(entry.first, entry.end)):
            kept.append(entry)
            wanted.update(ref.vid for ref in entry.references())
    kept.reverse()
    return kept


def step_function(
    entries: Sequence[Entry],
    outputs: Sequence[int],
    floats: bool,
    ints: bool,
    scope_class: type[Scope] = Scope,
) -> Callable[..., tuple[Array, ...]]:
    """A jax function of the step: inputs in order, then the lifted floats and ints if there are any.

    ``entries`` are those that ``outputs``, the numbers of the wanted values, depend on; ``floats`` and ``ints`` say
    which vectors exist. ``scope_class`` computes the operations (default: as they were recorded).
    """
    given = [entry.first for entry in inputs_of(entries)]
    operations = operations_of(entries)

    def step(*arrays: Array) -> tuple[Array, ...]:
        rest = list(arrays[len(given) :])
        ints_vector = rest.pop() if ints else None
        scope = scope_class({}, Lifted(rest.pop() if floats else None, ints_vector))
        scope.update(zip(given, arrays, strict=False))
        for operation in operations:
            scope.compute(OpInstance(operation))
        return tuple(scope[vid] for vid in outputs)

    return step


def repeats_of(
    entries: Sequence[Entry],
    outputs: Sequence[int],
    model: CostModel,
    never_inside: Collection[str] = (),
) -> tuple[Graph, Plan] | None:
    """The step as a graph and the repeats in it; None if no function would be worth it.

    ``entries`` are those that ``outputs``, the numbers of the wanted values, depend on. ``model`` says how much a
    function must save. Operators named in ``never_inside`` are never part of a function.
    """
    # what repeats saves less than all nodes cost
    if most_weight(entries) < model.min_saving:
        return None
    graph = build_graph(entries, outputs, never_inside)
    plan = find_repeats(graph.nodes, graph.wanted, model)
    return (graph, plan) if plan.functions else None


def loops_of(
    entries: Sequence[Entry],
    outputs: Sequence[int],
    model: CostModel,
    min_trips: int,
    pays: Callable[[Draft], bool],
) -> tuple[Graph, list[Step]] | None:
    """The step as a graph and as steps with loops; None if no loop would be worth it.

    ``entries`` are those that ``outputs``, the numbers of the wanted values, depend on. A loop has at least
    ``min_trips`` iterations, ``model`` says how much it must save, and ``pays`` whether it is worth its copies.
    """
    if most_weight(entries) < model.min_saving:
        return None
    graph = build_graph(entries, outputs)
    inside = _inside_regions(graph.nodes)
    steps = find_loops(graph.nodes, graph.wanted, min_trips, model, pays, inside)
    return (graph, steps) if steps else None


def _inside_regions(nodes: Iterable[Node]) -> set[int]:
    """The values in regions that must not be cut, from an operator that begins one to one that ends it."""
    inside: set[int] = set()
    for node in nodes:
        rule = node.payload.entry.plan.rule
        how = rule.in_loops if isinstance(rule, Rule) else "no"
        if how == "begins" or (how != "ends" and not inside.isdisjoint(node.operands)):
            inside.update(node.results)
    return inside
