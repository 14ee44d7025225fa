"""Step keys: how an operation and its operands are encoded as a key, and decoded from it.

A key is the number of a plan followed by its positional operands and then by its keyword operands, each
after its name. An operand is

- the number of a value, an int that is not negative,
- ``LIFT_FLOAT``, ``LIFT_INT``: a number that is an argument of the program; ``WIDE_FLOAT``, ``WIDE_INT``: one that
  the first operand's dtype cannot hold, which PyTorch may refuse; ``HOST_FLOAT`` or ``HOST_INT`` with a dtype: a
  number that was passed as a CPU tensor without dimensions,
- a type and a constant of it: ``int, 3``, ``float, 0.5``, ``bool, True``, ``str, "mean"``. Float zeros and
  NaN are encoded as text (``float, "-0.0"``), because equal keys must mean equal numbers; so are
  constants of other types,
- ``LIST``, its length and its elements, or ``SAME`` and the one element that it repeats; a list of
  plain ints is a tuple of them,
- None, a dtype, a layout, a memory format or a device, unchanged.

Keys hold nothing that Python's garbage collector has to visit. A model of a hundred layers records
tens of thousands of keys, which are decoded only when a compiler or a report needs the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.torch_bridge.operands import NamedOperands, Operand

LIFT_FLOAT: Final = -1
LIFT_INT: Final = -2
HOST_FLOAT: Final = -3
HOST_INT: Final = -4
LIST: Final = -5
SAME: Final = -6
WIDE_FLOAT: Final = -7
WIDE_INT: Final = -8

_SPELLED: dict[tuple[type, str], object] = {}

Operands = tuple[tuple[Operand, ...], NamedOperands]
"""Positional and keyword operands: ``Ref``, ``Lift``, constants, and lists of them."""


class Ref:
    """An operand of an entry: the value with this number."""

    __slots__ = ("vid", "meta")

    def __init__(self, vid: int, meta: TensorMeta) -> None:
        self.vid = vid
        self.meta = meta


class Lift:
    """A scalar operand that the program reads from its vector of lifted numbers.

    Its position is ``position`` in the vector of floats if ``is_float``, else in that of ints. ``example``, which
    type promotion uses, is a number of the operand's Python type, or a ``TensorMeta`` if the operand was a CPU
    tensor without dimensions.
    """

    __slots__ = ("is_float", "position", "example")

    def __init__(self, is_float: bool, position: int, example: float | TensorMeta) -> None:
        self.is_float = is_float
        self.position = position
        self.example = example


class Values:
    """The metas of a step's values by number, shared by the entries of one path of the tree.

    Where the paths of two steps separate, the later step begins its own ``Values``, and ``before`` leads to the
    common ones: a step that differs only in its last operation copies nothing.
    """

    __slots__ = ("before", "first", "metas")

    def __init__(self, before: Values | None, first: int) -> None:
        self.before = before
        self.first = first
        self.metas: list[TensorMeta | None] = []

    def __getitem__(self, vid: int) -> TensorMeta:
        """The meta of value ``vid``, which is a tensor."""
        values = self
        while vid < values.first:
            assert values.before is not None
            values = values.before
        meta = values.metas[vid - values.first]
        assert meta is not None
        return meta


def references(tree: object) -> Iterator[Ref]:
    """The references in an operand, or in a list or tuple of operands, in order."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from references(item)


def lifted(tree: object) -> Iterator[Lift]:
    """The lifted scalars in an operand, or in a list or tuple of operands, in order."""
    if isinstance(tree, Lift):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from lifted(item)


def map_operands(change: Callable[[object], object], tree: object) -> Operand:
    """``tree`` with ``change`` applied to every item that is not a list or tuple; both become lists."""
    if isinstance(tree, (list, tuple)):
        return [map_operands(change, item) for item in tree]
    return change(tree)


def spelled(constant: object) -> tuple[type, str]:
    """The encoding in a key of a constant whose own equality is too coarse (complex, numpy's scalars)."""
    key = (type(constant), repr(constant))
    _SPELLED[key] = constant
    return key


def read(key: Sequence[Operand], values: Values, floats: int, ints: int) -> Operands:
    """Decode the operands of the operation with this key.

    ``values`` has the metas of all earlier values; ``floats`` and ``ints`` are the counts of numbers that were
    lifted before it.
    """
    return _Reader(key, values, floats, ints).operands()


class _Reader:
    def __init__(self, key: Sequence[Operand], values: Values, floats: int, ints: int) -> None:
        self._items: Iterator[Operand] = iter(key[1:])
        self._values = values
        self._floats = floats
        self._ints = ints

    def operands(self) -> Operands:
        args: list[object] = []
        kwargs: NamedOperands = {}
        for item in self._items:
            if type(item) is str:
                kwargs[item] = self._operand(next(self._items))
            else:
                args.append(self._operand(item))
        return tuple(args), kwargs

    def _operand(self, item: object) -> object:
        if type(item) is int:
            if item >= 0:
                return Ref(item, self._values[item])
            return self._list() if item == LIST else self._lift(item)
        if isinstance(item, tuple):
            return list(item)
        return self._constant(item) if isinstance(item, type) else item

    def _list(self) -> list[object]:
        count = next(self._items)
        first = next(self._items)
        if first == SAME:
            return [self._operand(next(self._items))] * count
        return [self._operand(first), *(self._operand(next(self._items)) for _ in range(count - 1))]

    def _lift(self, marker: int) -> Lift:
        is_float = marker in (LIFT_FLOAT, WIDE_FLOAT, HOST_FLOAT)
        example: float | TensorMeta = 0.5 if is_float else 2
        if marker in (HOST_FLOAT, HOST_INT):
            example = tensor_meta((), next(self._items))
        if is_float:
            self._floats += 1
            return Lift(True, self._floats - 1, example)
        self._ints += 1
        return Lift(False, self._ints - 1, example)

    def _constant(self, kind: type) -> object:
        spelled = next(self._items)
        if kind is float:
            return float(spelled)
        return spelled if kind in (int, bool, str) else _SPELLED[kind, spelled]
