"""The state of a step that is being recorded: what begins anew with it, and what it is recorded under.

A ``Trace`` holds the state of one step in its attributes, where recording an operator finds it fastest. Who
lets another step be recorded meanwhile (the step of another thread, the body of a loop) takes the state out
as a ``StepRecord`` or a ``Recording`` and puts it back later, in one go that no exception cuts in two. All
other changes from outside this folder are methods of ``StepState``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, NamedTuple

from xla_core.recording.entry import Entry, Root
from xla_core.recording.storage import Aside, Storage
from xla_core.support import indivisible

_epochs = itertools.count(1)


class StepRecord(NamedTuple):
    """All that belongs to one step of one thread; the names are those of the trace's attributes.

    ``epoch`` is the step's own number, ``cur`` the entry that it has come to. ``inputs`` are the buffers that
    it reads, ``input_vids`` their slots by value number, ``input_storages`` the positions of their storages
    among ``touched``, which are all that the step has met. ``floats`` and ``ints`` are the lifted numbers.
    ``region`` is the use of ``torch_xla.compile`` that the thread is in (None: in none), ``graph_name`` what
    debug output calls its programs, ``forbidden`` the error to raise where something would run (None:
    everything may), and ``unreadable`` the error to raise where a value would be read (None: it may).
    """

    epoch: int
    cur: Entry
    inputs: list[Any]
    input_vids: dict[int, int]
    input_storages: list[int]
    touched: list[Storage]
    floats: list[float]
    ints: list[int]
    region: Any = None
    graph_name: str | None = None
    forbidden: str | None = None
    unreadable: str | None = None

    def renewed(self, root: Root) -> StepRecord:
        """A step that has recorded nothing below ``root``, in the same region and under the same rules."""
        return StepRecord(*beginning(root), *self[len(STEP) :])


# What begins anew with each step: the rest of a record is the thread's, and stays.
STEP: Final = StepRecord._fields[:8]
_record_of: Final = attrgetter(*StepRecord._fields)


def beginning(root: Root) -> tuple[Any, ...]:
    """Values for the attributes ``STEP`` of a trace: a step that has recorded nothing below ``root``."""
    return next(_epochs), root, [], {}, [], [], [], []


class RecordingMode(NamedTuple):
    """How steps are recorded, and into which tree; another one while the body of a computation is recorded.

    ``root`` is the tree's, with ``entries`` in it. ``aside`` records a body, and the step waits.
    ``eager_flush`` says that each operator is a program of its own now. ``lock`` and ``bare`` are the locks of
    the trace.
    """

    root: Root
    entries: int
    eager_flush: bool
    aside: Aside | None
    lock: Any
    bare: Any


_mode_of: Final = attrgetter(*RecordingMode._fields)


class RegionState(NamedTuple):
    """What a use of ``torch_xla.compile`` changes for its block: that part of the thread's ``StepRecord``."""

    region: Any
    graph_name: str | None
    forbidden: str | None


class Rules(NamedTuple):
    """What may not be done while a step is recorded: errors for reading a value, and for running the step.

    ``noted_marks``: values that are given away are noted here by their storages' ids, and none is marked.
    """

    unreadable: str | None
    forbidden: str | None
    noted_marks: dict[int, bool] | None = None


class Recording(NamedTuple):
    """A step and how it is recorded: what a body's recorder takes out of the trace, and puts back."""

    step: StepRecord
    mode: RecordingMode


class StepState:
    """The part of a ``Trace`` that is swapped when it records something else, and the rules that others set.

    The attributes are those of ``StepRecord`` and ``RecordingMode``. ``has_placeholders`` says that a tensor
    without a value was made, which a step may depend on. ``on_new_storage`` is called with every storage that is
    made from a buffer, while a step is captured. The caller of each method holds the trace's lock.
    """

    epoch: int
    cur: Entry
    inputs: list[Any]
    input_vids: dict[int, int]
    input_storages: list[int]
    touched: list[Storage]
    floats: list[float]
    ints: list[int]
    region: Any = None
    graph_name: str | None = None
    forbidden: str | None = None
    unreadable: str | None = None
    noted_marks: dict[int, bool] | None = None
    root: Root
    entries: int
    eager_flush: bool = False
    aside: Aside | None = None
    on_new_storage: Callable[[Storage], None] | None = None
    lock: Any
    bare: Any
    has_placeholders: bool = False
    flush: Callable[..., None]

    # -- swapping ------------------------------------------------------------------------------

    def step_record(self) -> StepRecord:
        """The step that is recorded here now, to be continued with ``resuming``."""
        return StepRecord._make(_record_of(self))

    def resuming(self, record: StepRecord) -> Iterator[None]:
        """For ``indivisible.do``: go on with another step."""
        return indivisible.storing(self, StepRecord._fields, record)

    def recording(self) -> Recording:
        """The step and how it is recorded, to be continued with ``installing``."""
        return Recording(self.step_record(), RecordingMode._make(_mode_of(self)))

    def installing(self, recording: Recording) -> Iterator[None]:
        """For ``indivisible.do``: go on with another step, recorded in another way."""
        step, mode = recording
        return itertools.chain(
            indivisible.storing(self, RecordingMode._fields, mode), self.resuming(step)
        )

    # -- rules ---------------------------------------------------------------------------------

    def forbid(self, reason: str | None) -> None:
        """Refuse from now on to run what the thread records, with ``reason`` as the error; None allows it."""
        self.forbidden = reason

    def refuse_reads(self, reason: str | None) -> None:
        """Refuse from now on to read values, with ``reason`` as the error; None allows it."""
        self.unreadable = reason

    def rules(self) -> Rules:
        """What may not be done now, for ``obeying``."""
        return Rules(self.unreadable, self.forbidden, self.noted_marks)

    def obeying(self, rules: Rules) -> Iterator[None]:
        """For ``indivisible.do``: let these be the rules from now on."""
        return indivisible.storing(self, Rules._fields, rules)

    def name_graph(self, name: str | None) -> None:
        """Let debug output call what the thread records from now on ``name``; None takes the name away."""
        self.graph_name = name

    def region_state(self) -> RegionState:
        """The use of ``torch_xla.compile`` that the thread is in, to come back to with ``entering``."""
        return RegionState(self.region, self.graph_name, self.forbidden)

    def entering(self, state: RegionState) -> Iterator[None]:
        """For ``indivisible.do``: let the thread be in another use of ``torch_xla.compile``, or in none."""
        return indivisible.storing(self, RegionState._fields, state)

    def tell_of_storages(self, listener: Callable[[Storage], None] | None) -> None:
        """Call ``listener`` with every storage that is made from a buffer from now on; None ends that."""
        self.on_new_storage = listener

    def expect_placeholders(self) -> None:
        """From now on steps may depend on tensors without a value."""
        self.has_placeholders = True

    def flush_as_operators(self, single: bool) -> None:
        """Run what is pending; ``single`` says that this is one operator, run because each is by itself."""
        try:
            try:
                self.eager_flush = single
                self.flush(self)
            finally:
                self.eager_flush = False
        finally:
            self.eager_flush = False  # also where an exception came in the line above
