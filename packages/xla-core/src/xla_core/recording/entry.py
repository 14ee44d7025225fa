"""One operation in one position of a step: a node of the prefix tree of all steps, see ``trace``."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Final

from xla_core.operators.plan import Plan
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording import source_location, step_key
from xla_core.recording.evictable import Kept, Table
from xla_core.recording.step_key import NO_OPERANDS, Lift, Operands, Ref, Values
from xla_core.support.counters import Tally

# Most entries have neither: one object for all of them.
_NONE: Final[Any] = MappingProxyType({})


class Entry:
    """One operation, or one program input, in one position of a step.

    ``metas`` are its results, numbered from ``first``; ``single`` is the meta when there is just
    one. ``values`` has the metas of all values up to its own. ``floats`` and ``ints``
    count the numbers lifted up to and including this entry, ``depth`` the entries. ``then`` is the first
    operation that ever followed, ``others`` are the rest by key: nearly every entry has one child.
    ``programs`` holds the compiled programs of the step that ends here, ``tally`` its operators' counters.
    ``where`` is the place in the user's program that recorded it first, if somebody asks for that, ``line``
    file and line of it, None in the backward pass. The root has no ``parent``.
    """

    __slots__ = (
        "parent", "key", "plan", "metas", "values", "single", "first", "end",
        "floats", "ints", "depth", "then", "others", "programs", "tally", "where", "line", "_operands",
    )  # fmt: skip

    def __init__(
        self,
        parent: Entry | None,
        key: Any,
        plan: Plan | None,
        metas: tuple[TensorMeta | None, ...],
        floats: int,
        ints: int,
        operands: Operands | None = None,
    ) -> None:
        self.parent = parent
        self.key = key
        self.plan = plan
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
        self.then: Entry | None = None
        self.others: dict[Any, Entry] = _NONE
        self.programs: Table = _NONE
        self.tally: Tally | None = None
        self._operands = operands
        self.where = source_location.locate() if source_location.locate is not None else None
        self.line: tuple[str, int] | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional operands: ``Ref``, ``Lift``, constants, and lists of them."""
        return self._read()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword operands, by name."""
        return self._read()[1]

    def _read(self) -> Operands:
        found = self._operands
        if found is None:
            found = NO_OPERANDS
            if self.plan is not None and self.parent is not None:
                before = self.parent
                found = step_key.read(self.key, self.values, before.floats, before.ints)
            self._operands = found
        return found

    def references(self) -> Iterator[Ref]:
        """The values that this operation reads, in order; some may come more than once."""
        yield from step_key.references(self.args)
        yield from step_key.references(tuple(self.kwargs.values()))

    def lifted(self) -> Iterator[Lift]:
        """The scalars that this operation takes from the vectors of lifted numbers."""
        yield from step_key.lifted(self.args)
        yield from step_key.lifted(tuple(self.kwargs.values()))

    def locate_here(self) -> None:
        """Remember the user's line that records this, if nobody has located it."""
        if self.where is None:
            found = source_location.user_frame()
            frames = (found,) if found is not None else ()
            self.where = source_location.Where(frames, found, "", False, False)

    def add(self, entry: Entry) -> None:
        """Keep an operation that follows for the first time."""
        if self.then is None:
            self.then = entry
        elif self.others is _NONE:
            self.others = {entry.key: entry}
        else:
            self.others[entry.key] = entry

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
