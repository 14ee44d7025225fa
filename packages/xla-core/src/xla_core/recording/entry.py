"""The entries of recorded steps, which are the nodes of the prefix tree of all steps (see ``trace``).

An ``Entry`` is an ``Input``, a value that the step takes from the device's memory, or an ``Operation``, which
computes values from earlier ones. The steps of a tree begin below its ``Root``, which belongs to none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Final

from xla_core.contract.foreign_values import CoreProgram, ForeignObject
from xla_core.operators.plan import Plan
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording import source_location, step_key
from xla_core.recording.evictable import Kept, Table
from xla_core.recording.step_key import Lift, Operands, Ref, Values, map_operands
from xla_core.support.counters import Tally
from xla_core.torch_bridge.operands import NamedOperands, Operand

# Most entries have no other children and no programs: they share this empty mapping.
_NONE: Final[ForeignObject] = MappingProxyType({})


class Entry:
    """One input, or one operation, in one position of a step.

    ``metas`` describes its results, whose value numbers begin with ``first``; ``single`` is the meta if there is
    just one. ``values`` has the metas of all values up to its own. ``floats`` and ``ints`` count the numbers lifted
    up to and including this entry, ``depth`` the entries. ``first_child`` is the first entry that ever followed,
    ``other_children`` has the rest by key: nearly every entry has one child. ``programs`` holds the compiled
    programs of the step that ends here, ``tally`` the counters of its operators. ``where`` is the place in the
    user's program that first recorded the entry, if a locator is set; ``line`` is its file and line, None in the
    backward pass. A root has no ``parent``.
    """

    __slots__ = (
        "parent", "key", "metas", "values", "single", "first", "end",
        "floats", "ints", "depth", "first_child", "other_children", "programs", "tally", "where", "line",
    )  # fmt: skip

    def __init__(
        self,
        parent: Entry | None,
        key: Operand,
        metas: tuple[TensorMeta | None, ...],
        floats: int,
        ints: int,
    ) -> None:
        self.parent = parent
        self.key = key
        self.metas = metas
        self.single = metas[0] if len(metas) == 1 else None
        if parent is None:
            self.first = self.depth = 0
            self.values = Values(None, 0)
        else:
            self.first = parent.end
            self.depth = parent.depth + 1
            self.values = parent.values
            if self.values.first + len(self.values.metas) != self.first:
                self.values = Values(self.values, self.first)  # another step has gone on from here
        self.values.metas.extend(metas)
        self.end: int = self.first + len(metas)
        self.floats = floats
        self.ints = ints
        self.first_child: Entry | None = None
        self.other_children: dict[object, Entry] = _NONE
        self.programs: Table = _NONE
        self.tally: Tally | None = None
        self.where = source_location.locate() if source_location.locate is not None else None
        self.line: tuple[str, int] | None = None

    def references(self) -> Iterator[Ref]:
        """The values that this entry reads, in order, possibly with repetitions. An input reads none."""
        return iter(())

    def lifted(self) -> Iterator[Lift]:
        """The scalars that this entry takes from the vectors of lifted numbers."""
        return iter(())

    def locate_here(self) -> None:
        """Store the user's line that is recording this entry, unless it has a location already."""
        if self.where is None:
            frame = source_location.user_frame()
            frames = (frame,) if frame is not None else ()
            self.where = source_location.SourceLocation(frames, frame, "", False, False)

    def relocate(
        self, where: source_location.SourceLocation | None, line: tuple[str, int] | None = None
    ) -> None:
        """Set the place in the user's program that recorded this; ``line`` None keeps file and line."""
        self.where = where
        if line is not None:
            self.line = line

    def keep_tally(self, tally: Tally) -> None:
        """Keep the counters of the operators of the step that ends here."""
        self.tally = tally

    def add(self, entry: Entry) -> None:
        """Add a child: an entry that follows this one for the first time."""
        if self.first_child is None:
            self.first_child = entry
        elif self.other_children is _NONE:
            self.other_children = {entry.key: entry}
        else:
            self.other_children[entry.key] = entry

    def clear_children(self) -> None:
        """Remove the children of this entry and of all below: what holds one of these then holds its step alone."""
        waiting = [self]
        while waiting:
            entry = waiting.pop()
            if entry.first_child is not None:
                waiting.append(entry.first_child)
            waiting.extend(entry.other_children.values())
            entry.first_child, entry.other_children = None, _NONE

    def keep(self, key: object, program: CoreProgram) -> None:
        """Store a program of the step that ends here; a compiled program is dropped when it is evicted."""
        if self.programs is _NONE:
            self.programs = Table()
        if isinstance(program, Kept):
            program.keep(self.programs, key)
        else:
            self.programs[key] = program

    def path(self) -> list[Entry]:
        """The step's entries in program order, up to and including this one."""
        entries: list[Entry] = []
        entry: Entry | None = self
        while entry is not None and entry.parent is not None:
            entries.append(entry)
            entry = entry.parent
        entries.reverse()
        return entries


class Root(Entry):
    """The node below which all steps of one tree begin."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, None, (), 0, 0)


class Input(Entry):
    """A value that the step takes from the device's memory; ``metas`` has its shape and dtype."""

    __slots__ = ()

    def __init__(self, parent: Entry, meta: TensorMeta) -> None:
        super().__init__(parent, meta.index, meta.as_tuple, parent.floats, parent.ints)

    @property
    def meta(self) -> TensorMeta:
        """Shape and dtype of the value."""
        meta = self.metas[0]
        assert meta is not None
        return meta


class Operation(Entry):
    """A call of an operator; ``plan`` says which operator it is and how it is lowered.

    It follows ``parent`` in the step. ``metas`` are the shapes and dtypes of its results, ``floats`` and ``ints``
    the counts of numbers that the step has lifted up to here. ``operands`` are passed only if the key does not
    contain them: in a step that was composed instead of recorded.
    """

    __slots__ = ("plan", "_operands")

    def __init__(
        self,
        parent: Entry,
        key: tuple[Operand, ...],
        plan: Plan,
        metas: tuple[TensorMeta | None, ...],
        floats: int,
        ints: int,
        operands: Operands | None = None,
    ) -> None:
        # not through super(), which takes as long as the rest: this runs for each new operation
        Entry.__init__(self, parent, key, metas, floats, ints)
        self.plan = plan
        self._operands = operands

    @property
    def args(self) -> tuple[Operand, ...]:
        """The positional operands: ``Ref``, ``Lift``, constants, and lists of them."""
        return self._read()[0]

    @property
    def kwargs(self) -> NamedOperands:
        """The keyword operands, by name."""
        return self._read()[1]

    def _read(self) -> Operands:
        operands = self._operands
        if operands is None:
            before = self.parent
            assert before is not None
            operands = step_key.read(self.key, self.values, before.floats, before.ints)
            self._operands = operands
        return operands

    def references(self) -> Iterator[Ref]:
        """The values that this operation reads, in order, possibly with repetitions."""
        yield from step_key.references(self.args)
        yield from step_key.references(tuple(self.kwargs.values()))

    def lifted(self) -> Iterator[Lift]:
        """The scalars that this operation takes from the vectors of lifted numbers."""
        yield from step_key.lifted(self.args)
        yield from step_key.lifted(tuple(self.kwargs.values()))


def inputs_of(entries: Iterable[Entry]) -> list[Input]:
    """The inputs among ``entries``, in order."""
    return [entry for entry in entries if isinstance(entry, Input)]


def operations_of(entries: Iterable[Entry]) -> list[Operation]:
    """The operations among ``entries``, in order."""
    return [entry for entry in entries if isinstance(entry, Operation)]


class Excerpt:
    """A new step made of entries of another step; its values and lifted numbers are renumbered.

    ``last`` is its last entry. ``vids`` maps the number of each value in the other step to its number here;
    ``floats`` and ``ints`` are the positions, in the other step, of the numbers that are lifted here, in order.
    """

    def __init__(self) -> None:
        self.last: Entry = Root()
        self.vids: dict[int, int] = {}
        self.floats: list[int] = []
        self.ints: list[int] = []

    def add_input(self, vid: int, meta: TensorMeta) -> None:
        """Make value ``vid`` of the other step an input of this one, whether or not it is computed there."""
        self.last = Input(self.last, meta)
        self.vids[vid] = self.last.first

    def add_operation(self, entry: Operation) -> Operation:
        """Copy an operation; all its operands must have been added already (else KeyError)."""
        args = tuple(map_operands(self._renumbered, entry.args))
        kwargs = {name: map_operands(self._renumbered, a) for name, a in entry.kwargs.items()}
        counts = len(self.floats), len(self.ints)
        copy = Operation(self.last, entry.key, entry.plan, entry.metas, *counts, (args, kwargs))
        copy.relocate(entry.where, entry.line)
        self.vids.update((entry.first + i, copy.first + i) for i in range(len(entry.metas)))
        self.last = copy
        return copy

    def _renumbered(self, a: object) -> object:
        if isinstance(a, Ref):
            return Ref(self.vids[a.vid], a.meta)
        if isinstance(a, Lift):
            positions = self.floats if a.is_float else self.ints
            positions.append(a.position)
            return Lift(a.is_float, len(positions) - 1, a.example)
        return a
