"""The data structures of the search for repeats: nodes, functions, and calls of functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Final, TypeAlias

from xla_core.contract.foreign_values import ForeignObject


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One operation: ``key`` describes it completely except for the values that it reads.

    ``operands`` and ``results`` are value numbers; every value is the result of at most one node
    of a sequence. ``weight`` is its compile cost. ``payload`` belongs to the caller.
    """

    key: Hashable
    operands: tuple[int, ...]
    results: tuple[int, ...]
    weight: float = 1.0
    payload: ForeignObject = None


@dataclasses.dataclass(slots=True, eq=False)
class Function:
    """A repeated run of items, compiled once: the items of one of its occurrences, with parameters and results.

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
    """A call of a function; ``operands`` and ``results`` correspond to its parameters and results.

    ``nodes`` are the operations that the call replaces, in the same order as in every other call
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
    """Decides when a run is worth a function; the unit is the compile cost of one plain node.

    A run of weight w that occurs k times saves (k - 1) * w. It costs ``per_call`` for each call that one
    execution of the program makes, and ``per_value`` for each value that a call passes to the next one. It
    must weigh at least ``min_weight``, and save at least ``min_saving`` in total.
    """

    min_weight: float = 12.0
    min_saving: float = 40.0
    per_call: float = 1.0
    per_value: float = 1.0


DEFAULT_COSTS: Final = CostModel()
"""The costs if the caller passes none."""


@dataclasses.dataclass(slots=True)
class Plan:
    """A sequence whose repeats are replaced by calls, and the functions in the order in which they were found."""

    items: list[Item]
    functions: list[Function]
    work: int


def flat_nodes(items: Iterable[Item]) -> Iterator[Node]:
    """The operations of items, including those that calls replace."""
    for item in items:
        if isinstance(item, Call):
            yield from item.nodes
        else:
            yield item
