"""Python numbers that remember how they were computed, and formulas that compute them again.

An optimizer's step computes numbers for operators from learning rates, betas and step counts (``lr / (1 - beta1 **
step)``). If it runs once on ``Traced`` numbers, a ``Table`` has the expression of each computed number, by its
value. A ``Formulas`` object evaluates many expressions at once on the present numbers, by the same operations of
Python, so that results are the same to the last bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from xla_core.contract.foreign_values import AnyFunction, JsonValue
from xla_core.torch_bridge.operands import Operand

Source: TypeAlias = tuple[JsonValue, ...]
"""The place that a number is read from: ``("group", 0, "lr")``, ``("group", 0, "betas", 1)``, ``("step", ...)``."""

Expression: TypeAlias = Operand
"""A ``Source`` in a tuple after ``"source"``, a number, or an operation and one or two expressions."""


class Branches(Exception):
    """A step compares a number that may change, so its further course would depend on that number."""


class Table:
    """The numbers that were computed from traced ones, by value; ``nonzero`` are the sources compared with 0."""

    def __init__(self) -> None:
        self.expressions: dict[float, Expression] = {}
        self.nonzero: set[Source] = set()

    def source(self, value: float, source: Source) -> Traced:
        """A number that is read from ``source``."""
        return self.keep(value, ("source", source))

    def keep(self, value: float, expression: Expression) -> Traced:
        """A number that is computed as ``expression``."""
        traced = Traced(value)
        traced.expression = expression
        traced.table = self
        self.expressions.setdefault(value, expression)
        return traced


class Traced(float):
    """A float that remembers how it was computed."""

    __slots__ = ("expression", "table")
    expression: Expression
    table: Table

    def __bool__(self) -> bool:
        return self != 0

    def _without_zero(self, other: object) -> float:
        """The plain value, for a comparison of what was read with 0; raises Branches for any other."""
        if type(other) not in (int, float) or other or self.expression[0] != "source":
            raise Branches
        self.table.nonzero.add(self.expression[1])  # zeros are not traced
        return float(self)

    def __eq__(self, other: object) -> bool:
        return self._without_zero(other) == 0

    def __ne__(self, other: object) -> bool:
        return self._without_zero(other) != 0

    def __lt__(self, other: object) -> bool:
        return self._without_zero(other) < 0

    def __gt__(self, other: object) -> bool:
        return self._without_zero(other) > 0

    __le__, __ge__ = __lt__, __gt__
    __hash__ = float.__hash__


def _plain(value: Operand) -> Operand:
    return float(value) if type(value) is Traced else value


def _expression(value: Operand) -> Expression:
    return value.expression if type(value) is Traced else value


def _binary(operation: Callable[[float, float], float], reflected: bool) -> Callable[..., object]:
    def method(self: Traced, other: object, *rest: object) -> object:
        if rest or type(other) not in (int, float, Traced):
            return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        value = operation(_plain(a), _plain(b))
        return self.table.keep(value, (operation, _expression(a), _expression(b)))

    return method


def _unary(operation: Callable[[float], float]) -> Callable[[Traced], object]:
    def method(self: Traced) -> object:
        return self.table.keep(operation(_plain(self)), (operation, self.expression))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _operation = getattr(operator, _name)
    setattr(Traced, f"__{_name}__", _binary(_operation, False))
    setattr(Traced, f"__r{_name}__", _binary(_operation, True))
for _name in ("neg", "abs", "pos"):
    setattr(Traced, f"__{_name}__", _unary(getattr(operator, _name)))

Read: TypeAlias = Callable[[], float]


class Formulas:
    """Computes the lifted floats of a step: those with an expression again, the others unchanged.

    ``expressions`` has an expression for each position that has one, ``constants`` the numbers of all. ``reader``
    gives, for a source, a function that reads it.
    """

    def __init__(
        self,
        constants: Sequence[float],
        expressions: dict[int, Expression],
        reader: Callable[[Source], Read],
    ) -> None:
        self._reader = reader
        self._registers: list[object] = []
        self._known: dict[object, int] = {}
        self._sources: list[tuple[int, Read]] = []
        self._work: list[tuple[int, AnyFunction, int, int]] = []
        places = [
            self._register(expressions[i]) if i in expressions else self._constant(value)
            for i, value in enumerate(constants)
        ]
        # a single place gives a number in place of a sequence, which a target of one number takes, too
        self._pick: Final = operator.itemgetter(*places or (slice(0),))
        self._count: Final = len(places)
        self.fixed: Final = not self._sources

    def _constant(self, value: Operand) -> int:
        return self._new((type(value), repr(value)), value)

    def _new(self, key: object, value: Operand) -> int:
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._registers)
            self._registers.append(value)
        return number

    def _register(self, expression: Expression) -> int:
        if not isinstance(expression, tuple):
            return self._constant(expression)
        if expression in self._known:
            return self._known[expression]
        if expression[0] == "source":
            number = self._new(expression, 0.0)
            self._sources.append((number, self._reader(expression[1])))
            return number
        operation, *operands = expression
        registers = [self._register(one) for one in operands]
        number = self._new(expression, 0.0)
        if len(registers) == 1:
            operation, registers = _of_first(operation), registers * 2
        self._work.append((number, operation, *registers))
        return number

    def evaluate(self) -> np.ndarray:
        """The numbers as they are now (float64)."""
        numbers = np.empty(self._count, np.float64)
        self.store(numbers)
        return numbers

    def store(self, target: np.ndarray) -> None:
        """Store the numbers as they are now in ``target`` (float64, of their number)."""
        registers = self._registers
        for number, read in self._sources:
            registers[number] = read()
        for number, operation, a, b in self._work:
            registers[number] = operation(registers[a], registers[b])
        target[:] = self._pick(registers)


def _of_first(operation: AnyFunction) -> AnyFunction:
    """``operation`` as a function of two numbers that leaves out the second."""
    return lambda a, _: operation(a)
