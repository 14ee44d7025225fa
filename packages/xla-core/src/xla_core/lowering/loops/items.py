"""The data structures of loops: stacks of values, what an iteration reads, and loops."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from xla_core.lowering.repeats.items import Node


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Values of one shape along a new first dimension, by their numbers."""

    elements: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Invariant:
    """One value in all iterations."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """``first`` in the first iteration, then what the one before computed as ``result``, a value of the body."""

    first: int
    result: int


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """Element ``first + step * i`` of a stack in iteration ``i``."""

    stack: Stack
    first: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lifts:
    """A lifted number whose position in the step's vector differs: ``numbers`` has its number in each iteration."""

    numbers: tuple[int, ...]


Source: TypeAlias = Invariant | Carried | Element | Lifts


@dataclasses.dataclass(slots=True, eq=False)
class Loop:
    """A repeat that runs ``trips`` times in a row.

    ``body`` are the nodes of one of the iterations. ``sources`` says, for each value that the body reads from
    outside, what it is. ``kept`` are the values of the body, parameters included, of which all iterations' values
    are needed after the loop, with the stacks that they become. ``last`` maps values of the body to the numbers
    that they have outside after the last iteration.
    """

    body: list[Node]
    trips: int
    sources: dict[int, Source]
    kept: list[tuple[int, Stack]]
    last: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """Makes a stack of its elements."""

    stack: Stack


@dataclasses.dataclass(frozen=True, slots=True)
class Take:
    """Makes ``value`` from element ``index`` of a stack."""

    value: int
    stack: Stack
    index: int


Step: TypeAlias = Node | Loop | Build | Take
