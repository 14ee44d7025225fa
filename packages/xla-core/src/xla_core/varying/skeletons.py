"""A recorded step without its numbers, the numbers, and the step with other numbers in their places.

The *skeleton* of a step is the keys of its entries without sizes and Python integers: which operators, which
operands, which dtypes and ranks. The *numbers* are those sizes and integers in order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.jax_bridge.traced_values import Size
from xla_core.lowering.repeat_graph import OpInstance
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta, unshared_meta
from xla_core.recording.entry import Entry, Operation
from xla_core.recording.step_key import Lift, Ref, references
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands


class _Number:
    """Marks the place of a number."""


_NUMBER = _Number()
_FLAG = _Number()
# Tensors filled with one truth value: "this is the last token" and "this is not" can share a program.
_FILLS: Final = frozenset({"aten.full.default", "aten.full_like.default", "aten.new_full.default"})


class Wiped(NamedTuple):
    """A step's skeleton and numbers, and which of them (positions) are sizes of its values.

    ``values`` are the positions of each value's sizes, by the value's number. ``flags`` are the truth values that
    tensors are filled with: they are not part of the skeleton, and a program for a bound takes them as arguments.
    """

    skeleton: Hashable
    numbers: list[int]
    sizes: list[int]
    values: dict[int, range]
    flags: list[bool]


def wiped(entries: Sequence[Entry]) -> Wiped:
    """The skeleton and the numbers of a step."""
    numbers: list[int] = []
    sizes: list[int] = []
    values: dict[int, range] = {}
    flags: list[bool] = []
    lines = []
    for entry in entries:
        line: tuple[object, ...] = ()
        if isinstance(entry, Operation):
            named = tuple((name, _wipe(a, numbers)) for name, a in entry.kwargs.items())
            args = entry.args
            if _is_flag(entry, args):
                flags.append(args[-1])
                args = (*args[:-1], _FLAG)
            line = (entry.plan.number, _wipe(args, numbers), named)
        start = len(numbers)
        for vid, meta in enumerate(entry.metas, entry.first):
            if meta is None:
                line += (None,)
            else:
                values[vid] = range(len(numbers), len(numbers) + len(meta.shape))
                numbers.extend(meta.shape)
                line += (meta.dtype, len(meta.shape))
        sizes.extend(range(start, len(numbers)))
        lines.append(line)
    return Wiped(tuple(lines), numbers, sizes, values, flags)


def _is_flag(entry: Operation, args: Sequence[object]) -> bool:
    """Whether the last of an operation's operands is a truth value that fills its result."""
    if entry.plan.name not in _FILLS or type(args[-1]) is not bool:
        return False
    meta = entry.metas[0]
    return meta is not None and meta.dtype is torch.bool


def _wipe(operand: object, numbers: list[int]) -> Hashable:
    """A hashable form of an operand, equal for equal operands; its integers are appended to ``numbers``."""
    if type(operand) is int:
        numbers.append(operand)
        return _NUMBER
    if isinstance(operand, Ref):
        return Ref, operand.vid
    if isinstance(operand, Lift):
        example = operand.example
        kind = example.dtype if isinstance(example, TensorMeta) else type(example)
        return Lift, operand.is_float, operand.position, kind
    if isinstance(operand, (list, tuple)):
        return (type(operand), *(_wipe(item, numbers) for item in operand))
    if isinstance(operand, Hashable) and not isinstance(operand, (float, complex)):
        return type(operand), operand
    return type(operand), repr(operand)  # which tells 0.0 from -0.0, and finds NaN equal to NaN


Arguments: TypeAlias = tuple[Operands, NamedOperands]


@dataclasses.dataclass(frozen=True, slots=True)
class VaryingPart(OpInstance):
    """A recorded operation with symbolic sizes in place of some of its numbers.

    ``given`` are its arguments, ``promised`` the metas of its results; ``varies`` says whether any of them has a
    symbolic size.
    """

    given: Arguments = ((), {})
    promised: tuple[TensorMeta | None, ...] = ()
    varies: bool = False

    def arguments(self) -> Arguments:
        """Its arguments, with symbolic sizes in them."""
        return self.given

    def metas(self) -> tuple[TensorMeta | None, ...]:
        """The metas of its results."""
        return self.promised

    def operands(self) -> list[Ref]:
        """The values that it reads, each once."""
        args, kwargs = self.given
        refs = [*references(args), *references(tuple(kwargs.values()))]
        return list({ref.vid: ref for ref in refs}.values())


class Filled(NamedTuple):
    """A step with other numbers: the metas of its values by number, and its operations."""

    metas: dict[int, TensorMeta | None]
    parts: list[VaryingPart]


def filled(entries: Sequence[Entry], numbers: Sequence[object]) -> Filled:
    """The step with ``numbers`` in place of its own, in the order of ``wiped``; they may be symbolic sizes.

    Its flags become lifted integers behind the others.
    """
    rest = iter(numbers)
    places = itertools.count(entries[-1].ints)
    metas: dict[int, TensorMeta | None] = {}
    parts = []
    for entry in entries:
        arguments: Arguments = ((), {})
        if isinstance(entry, Operation):
            named = {name: _fill(a, rest, metas) for name, a in entry.kwargs.items()}
            args = entry.args
            if _is_flag(entry, args):
                args = (*args[:-1], Lift(False, next(places), tensor_meta((), torch.bool)))
            arguments = (tuple(_fill(a, rest, metas) for a in args), named)
        own = tuple(None if m is None else _meta(m, rest) for m in entry.metas)
        metas.update(zip(range(entry.first, entry.end), own, strict=True))
        if isinstance(entry, Operation):
            parts.append(VaryingPart(entry, None, arguments, own, _varies(arguments, own)))
    return Filled(metas, parts)


def text(filled: Filled, entries: Sequence[Entry]) -> str:
    """A step with other numbers as text, which determines its program and is the same in every process."""
    operations = {part.entry.first: part for part in filled.parts}
    lines = []
    for entry in entries:
        metas = [filled.metas[vid] for vid in range(entry.first, entry.end)]
        part = operations.get(entry.first)
        if part is None:
            lines.append(f"input {metas}")
        else:
            args, kwargs = part.given
            named = " ".join(f"{name}={_word(a)}" for name, a in kwargs.items())
            lines.append(f"{part.entry.plan.name} {_word(args)} {named} -> {metas}")
    return "\n".join(lines)


def _word(operand: object) -> str:
    if isinstance(operand, Ref):
        return f"%{operand.vid}"
    if isinstance(operand, Lift):
        example = operand.example
        kind = example if isinstance(example, TensorMeta) else type(example).__name__
        return f"lifted {operand.is_float} {operand.position} {kind}"
    if isinstance(operand, (list, tuple)):
        return f"[{', '.join(map(_word, operand))}]"
    return f"{type(operand).__name__} {operand!r}"


def _fill(operand: Operand, rest: Iterator[object], metas: dict[int, TensorMeta | None]) -> object:
    if type(operand) is int:
        return next(rest)
    if isinstance(operand, Ref):
        meta = metas[operand.vid]
        assert meta is not None
        return Ref(operand.vid, meta)
    if isinstance(operand, (list, tuple)):
        return [_fill(item, rest, metas) for item in operand]
    return operand


def _meta(meta: TensorMeta, rest: Iterator[Size]) -> TensorMeta:
    shape = tuple(next(rest) for _ in meta.shape)
    make = unshared_meta if any(map(is_symbolic, shape)) else tensor_meta
    return make(shape, meta.dtype)


def _varies(arguments: Arguments, metas: Sequence[TensorMeta | None]) -> bool:
    args, kwargs = arguments
    trees = (*args, *kwargs.values(), *(m for m in metas if m is not None))
    return any(map(_mentions_symbols, trees))


def _mentions_symbols(tree: object) -> bool:
    if isinstance(tree, (list, tuple)):
        return any(map(_mentions_symbols, tree))
    if isinstance(tree, Ref):
        tree = tree.meta
    if isinstance(tree, TensorMeta):
        return not all(type(size) is int for size in tree.shape)
    return not isinstance(tree, (int, float, str, bool, type(None))) and is_symbolic(tree)
