"""Finds the first difference between two recorded steps; ``recompile_text`` describes it.

Steps with the same beginning share entries of the trace's tree, so that the first difference is where their paths
part. The entries after it are compared by operator only, to distinguish changes from additions: an addition shifts
the numbers of all values behind it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from xla_core.extension_api.operators import Operand, schema_of
from xla_core.extension_api.steps import Entry, Lift, Operation, Ref, operations_of

# The number of consecutive operators that must agree for two steps to count as aligned again.
_AGREEMENT: Final = 3
# The most entries after the first difference among which the steps are aligned.
_WINDOW: Final = 400


class Kind(enum.Enum):
    """The kind of the first difference between two steps."""

    RESULTS = "the same operations, with other results"
    ENDS = "ends earlier"
    GOES_ON = "goes on"
    INPUT = "an input of another shape or dtype"
    ARGUMENTS = "an operator with other arguments"
    ADDED = "operations added"
    MISSING = "operations missing"
    OTHER = "other operations"


@dataclasses.dataclass(frozen=True)
class Change:
    """An argument of an operator that differs: its name or number, and both values."""

    argument: str
    old: Operand
    new: Operand


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between two steps, behind ``position`` equal entries.

    ``old`` and ``new`` are the entries there in which the steps differ. For ADDED, MISSING and OTHER these are all
    entries up to the place where the steps agree again, for ENDS and GOES_ON all remaining entries. ``old_next``
    and ``new_next`` are the first operators (not inputs) behind them. ``changes`` are the arguments that differ
    (ARGUMENTS).
    """

    kind: Kind
    position: int
    old: tuple[Entry, ...] = ()
    new: tuple[Entry, ...] = ()
    changes: tuple[Change, ...] = ()
    old_next: Entry | None = None
    new_next: Entry | None = None


def name_of(entry: Entry) -> str:
    """The name of an entry's operator; ``input`` for an input."""
    return entry.plan.name if isinstance(entry, Operation) else "input"


def count_operations(entries: Sequence[Entry]) -> int:
    """The number of operators among the entries; the others are inputs."""
    return len(operations_of(entries))


def common_length(old: Sequence[Entry], new: Sequence[Entry]) -> int:
    """How many entries two steps share from their beginning."""
    low, high = 0, min(len(old), len(new))
    while low < high:  # entries are shared up to one position and never after it
        middle = (low + high + 1) // 2
        if old[middle - 1] is new[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_with(last: Entry, positions: Mapping[Entry, int]) -> int:
    """How many entries the step that ends with ``last`` shares with another, whose entries have these positions."""
    entry: Entry | None = last
    while entry is not None:
        position = positions.get(entry)
        if position is not None:
            return position + 1
        entry = entry.parent
    return 0


def compare(old: Sequence[Entry], new: Sequence[Entry]) -> Difference:
    """The first difference of ``new`` from ``old``."""
    at = common_length(old, new)
    if at == len(new):
        if at == len(old):
            return Difference(Kind.RESULTS, at)
        return Difference(Kind.ENDS, at, old=tuple(old[at:]))
    if at == len(old):
        return Difference(Kind.GOES_ON, at, new=tuple(new[at:]))
    skipped_old, skipped_new = _agreement(old, new, at)
    if skipped_old == skipped_new == 0:
        return _changed(old, new, at)
    kind = Kind.OTHER
    if skipped_old == 0:
        kind = Kind.ADDED
    elif skipped_new == 0:
        kind = Kind.MISSING
    return Difference(
        kind,
        at,
        tuple(old[at : at + skipped_old]),
        tuple(new[at : at + skipped_new]),
        old_next=_operator(old, at + skipped_old),
        new_next=_operator(new, at + skipped_new),
    )


def _changed(old: Sequence[Entry], new: Sequence[Entry], at: int) -> Difference:
    before, after = old[at], new[at]
    kind, changes = Kind.INPUT, tuple[Change, ...]()
    if isinstance(before, Operation) and isinstance(after, Operation):
        kind, changes = Kind.ARGUMENTS, tuple(argument_changes(before, after))
    return Difference(
        kind, at, (before,), (after,), changes, _operator(old, at), _operator(new, at)
    )


def _operator(entries: Sequence[Entry], start: int) -> Entry | None:
    return next(iter(operations_of(entries[start:])), None)


def _agreement(old: Sequence[Entry], new: Sequence[Entry], at: int) -> tuple[int, int]:
    """How many entries to skip in each step until the same operators follow, as few as possible.

    (0, 0) if the entries at ``at`` have the same operator; all remaining entries if the steps do not agree again.
    """
    left = [name_of(e) for e in old[at : at + _WINDOW]]
    right = [name_of(e) for e in new[at : at + _WINDOW]]
    if left == right:
        return 0, 0
    for skipped in range(_WINDOW):
        for fewer in range(skipped // 2 + 1):
            for a, b in ((fewer, skipped - fewer), (skipped - fewer, fewer)):
                if a < len(left) and b < len(right) and _agree(left, a, right, b):
                    return a, b
    return len(old) - at, len(new) - at


def _agree(left: list[str], a: int, right: list[str], b: int) -> bool:
    here, there = left[a : a + _AGREEMENT], right[b : b + _AGREEMENT]
    needed = min(_AGREEMENT, max(len(left) - a, len(right) - b))
    return len(here) >= needed and here == there


def argument_changes(old: Operation, new: Operation) -> Iterator[Change]:
    """The arguments in which two calls of one operator differ."""
    names = [a.name for a in schema_of(old.plan.overload).arguments]
    for index in range(max(len(old.args), len(new.args))):
        before = old.args[index] if index < len(old.args) else None
        after = new.args[index] if index < len(new.args) else None
        if not _same(before, after):
            named = index < len(names) and not old.plan.is_put
            yield Change(names[index] if named else f"argument {index}", before, after)
    for name in {**old.kwargs, **new.kwargs}:
        before, after = old.kwargs.get(name), new.kwargs.get(name)
        if not _same(before, after):
            yield Change(name, before, after)


def _same(old: Operand, new: Operand) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, Ref):
        return bool(old.vid == new.vid)
    if isinstance(old, Lift):
        return (old.is_float, old.position, repr(old.example)) == (
            new.is_float, new.position, repr(new.example),
        )  # fmt: skip
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    return bool(old == new) and repr(old) == repr(new)
