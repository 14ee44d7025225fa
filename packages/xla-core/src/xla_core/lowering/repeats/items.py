"""The sequences in which repeats are looked for, and what is found: nodes, functions, calls of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, TypeAlias


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
        """Equal for calls of one function."""
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


DEFAULT_COSTS: Final = CostModel()
"""The costs where the caller knows no better."""


@dataclasses.dataclass(slots=True)
class Plan:
    """A sequence with its repeats replaced by calls, and the functions in the order of discovery."""

    items: list[Item]
    functions: list[Function]
    work: int


def flat_nodes(items: Iterable[Item]) -> Iterator[Node]:
    """The operations of items, those that calls stand for included."""
    for item in items:
        if isinstance(item, Call):
            yield from item.nodes
        else:
            yield item
