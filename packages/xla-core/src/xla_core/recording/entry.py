"""What a step is made of, in order: the nodes of the prefix tree of all steps, see ``trace``.

An ``Entry`` is an ``Input``, a value that the step takes from the device's memory, or an ``Operation``, which
computes values from earlier ones. A ``Root`` is where the steps of a tree begin; it is in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

from xla_core.operators.plan import Plan
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording import source_location, step_key
from xla_core.recording.evictable import Kept, Table
from xla_core.recording.step_key import Lift, Operands, Ref, Values, map_operands
from xla_core.support.counters import Tally

# Most entries have neither: one object for all of them.
_NONE: Final[Any] = MappingProxyType({})


class Entry:
    """One input, or one operation, in one position of a step.

    ``metas`` are its results, numbered from ``first``; ``single`` is the meta when there is just
    one. ``values`` has the metas of all values up to its own. ``floats`` and ``ints``
    count the numbers lifted up to and including this entry, ``depth`` the entries. ``first_child`` is the first
    entry that ever followed, ``other_children`` are the rest by key: nearly every entry has one child.
    ``programs`` holds the compiled programs of the step that ends here, ``tally`` its operators' counters.
    ``where`` is the place in the user's program that recorded it first, if somebody asks for that, ``line``
    file and line of it, None in the backward pass. A root has no ``parent``.
    """

    __slots__ = (
        "parent", "key", "metas", "values", "single", "first", "end",
        "floats", "ints", "depth", "first_child", "other_children", "programs", "tally", "where", "line",
    )  # fmt: skip

    def __init__(
        self,
        parent: Entry | None,
        key: Any,
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
        self.other_children: dict[Any, Entry] = _NONE
        self.programs: Table = _NONE
        self.tally: Tally | None = None
        self.where = source_location.locate() if source_location.locate is not None else None
        self.line: tuple[str, int] | None = None

    def references(self) -> Iterator[Ref]:
        """The values that this reads, in order; some may come more than once. An input reads none."""
        return iter(())

    def lifted(self) -> Iterator[Lift]:
        """The scalars that this takes from the vectors of lifted numbers."""
        return iter(())

    def locate_here(self) -> None:
        """Remember the user's line that records this, if nobody has located it."""
        if self.where is None:
            frame = source_location.user_frame()
            frames = (frame,) if frame is not None else ()
            self.where = source_location.SourceLocation(frames, frame, "", False, False)

    def relocate(
        self, where: source_location.SourceLocation | None, line: tuple[str, int] | None = None
    ) -> None:
        """Say that another place in the user's program recorded this; ``line`` None keeps file and line."""
        self.where = where
        if line is not None:
            self.line = line

    def keep_tally(self, tally: Tally) -> None:
        """Keep the counters of the operators of the step that ends here."""
        self.tally = tally

    def add(self, entry: Entry) -> None:
        """Keep an operation that follows for the first time."""
        if self.first_child is None:
            self.first_child = entry
        elif self.other_children is _NONE:
            self.other_children = {entry.key: entry}
        else:
            self.other_children[entry.key] = entry

    def keep(self, key: Any, program: Any) -> None:
        """Keep what was made of the step that ends here; a compiled program until it is evicted."""
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
    """Where the steps of one tree begin."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, None, (), 0, 0)


class Input(Entry):
    """A value that the step takes from the device's memory, and its shape and dtype in ``metas``."""

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
    """An operator that computes values: ``plan`` says which, and how it is lowered.

    It comes after ``parent`` in the step. ``metas`` are its results' shapes and dtypes, ``floats`` and ``ints``
    how many numbers the step has lifted up to here. ``operands`` are given where they do not stand in the key:
    in a step that nobody recorded.
    """

    __slots__ = ("plan", "_operands")

    def __init__(
        self,
        parent: Entry,
        key: Any,
        plan: Plan,
        metas: tuple[TensorMeta | None, ...],
        floats: int,
        ints: int,
        operands: Operands | None = None,
    ) -> None:
        # not through super(), which takes as long as the rest: each new operation comes here
        Entry.__init__(self, parent, key, metas, floats, ints)
        self.plan = plan
        self._operands = operands

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional operands: ``Ref``, ``Lift``, constants, and lists of them."""
        return self._read()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
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
        """The values that this operation reads, in order; some may come more than once."""
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
    """A step of its own, made of entries of another step: its values and lifted numbers are counted anew.

    ``last`` is its last entry. ``vids`` gives the number here of each value by its number in the other step;
    ``floats`` and ``ints`` are the positions there of the numbers that are lifted here, in order.
    """

    def __init__(self) -> None:
        self.last: Entry = Root()
        self.vids: dict[int, int] = {}
        self.floats: list[int] = []
        self.ints: list[int] = []

    def add_input(self, vid: int, meta: TensorMeta) -> None:
        """Let value ``vid`` of the other step be an input of this one, whatever computes it there."""
        self.last = Input(self.last, meta)
        self.vids[vid] = self.last.first

    def add_operation(self, entry: Operation) -> Operation:
        """Copy an operation, all of whose operands are here already (else KeyError)."""
        args = tuple(map_operands(self._renumbered, entry.args))
        kwargs = {name: map_operands(self._renumbered, a) for name, a in entry.kwargs.items()}
        counts = len(self.floats), len(self.ints)
        copy = Operation(self.last, entry.key, entry.plan, entry.metas, *counts, (args, kwargs))
        copy.relocate(entry.where, entry.line)
        self.vids.update((entry.first + i, copy.first + i) for i in range(len(entry.metas)))
        self.last = copy
        return copy

    def _renumbered(self, a: object) -> Any:
        if isinstance(a, Ref):
            return Ref(self.vids[a.vid], a.meta)
        if isinstance(a, Lift):
            positions = self.floats if a.is_float else self.ints
            positions.append(a.position)
            return Lift(a.is_float, len(positions) - 1, a.example)
        return a
