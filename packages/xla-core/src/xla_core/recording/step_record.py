"""The state of a step that is being recorded, and the rules under which it is recorded.

A ``Trace`` holds the state of one step in its attributes, where recording an operator finds it fastest. To
record another step in the meantime (the step of another thread, the body of a loop), code takes the state out
as a ``StepRecord`` or a ``Recording`` and puts it back later, as one indivisible action. All
other changes from outside this folder are methods of ``StepState``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Final, NamedTuple

from xla_core.contract.foreign_values import ForeignObject
from xla_core.recording.entry import Entry, Root
from xla_core.recording.storage import BodyRecorder, HeldBuffer, Storage
from xla_core.support import indivisible

_epochs = itertools.count(1)


class StepRecord(NamedTuple):
    """The state of one step of one thread; its fields are named like the trace's attributes.

    ``epoch`` is the step's number, ``cur`` its last entry so far. ``inputs`` are the buffers that
    it reads, ``input_vids`` their slots by value number, ``input_storages`` the positions of their storages
    in ``touched``, the storages that the step has read or written. ``floats`` and ``ints`` are the lifted numbers.
    ``region`` is the use of ``torch_xla.compile`` that the thread is inside, or None. ``graph_name`` is the name of
    its programs in debug output. ``forbidden`` is the message of the error to raise when something would run, and
    ``unreadable`` that of the error to raise when a value would be read; None permits it.
    """

    epoch: int
    cur: Entry
    inputs: list[HeldBuffer]
    input_vids: dict[int, int]
    input_storages: list[int]
    touched: list[Storage]
    floats: list[float]
    ints: list[int]
    region: ForeignObject = None
    graph_name: str | None = None
    forbidden: str | None = None
    unreadable: str | None = None

    def renewed(self, root: Root) -> StepRecord:
        """An empty step below ``root``, in the same region and under the same rules."""
        return StepRecord(*beginning(root), *self[len(STEP) :])


# The fields that are reset for each step; the others belong to the thread, and remain.
STEP: Final = StepRecord._fields[:8]
_record_of: Final = attrgetter(*StepRecord._fields)


def beginning(root: Root) -> tuple[ForeignObject, ...]:
    """Values for the attributes ``STEP`` of a trace: an empty step below ``root``."""
    return next(_epochs), root, [], {}, [], [], [], []


class RecordingMode(NamedTuple):
    """How steps are recorded, and into which tree. The body of a computation is recorded in another mode.

    ``root`` is the root of the tree, which has ``entries`` entries. ``body_recorder`` records a body while
    the step waits.
    ``eager_flush`` says that each operator now runs as a program of its own. ``lock`` and ``bare`` are the locks of
    the trace.
    """

    root: Root
    entries: int
    eager_flush: bool
    body_recorder: BodyRecorder | None
    lock: AbstractContextManager[object]
    bare: AbstractContextManager[object]


_mode_of: Final = attrgetter(*RecordingMode._fields)


class RegionState(NamedTuple):
    """The part of a thread's ``StepRecord`` that a use of ``torch_xla.compile`` changes for its block."""

    region: ForeignObject
    graph_name: str | None
    forbidden: str | None


class Rules(NamedTuple):
    """What is forbidden while a step is recorded: the errors for reading a value and for running the step.

    If ``noted_marks`` is a dict, values that are given away are noted in it by the ids of their storages, and are
    not marked.
    """

    unreadable: str | None
    forbidden: str | None
    noted_marks: dict[int, bool] | None = None


class Recording(NamedTuple):
    """A step and its recording mode, which the recorder of a body takes out of the trace and puts back."""

    step: StepRecord
    mode: RecordingMode


class StepState:
    """The part of a ``Trace`` that is swapped when another step is recorded, and the rules that upper layers set.

    The attributes are those of ``StepRecord`` and ``RecordingMode``. ``has_placeholders`` says that a tensor
    without a value was made, on which a step may depend. While a step is captured, ``on_new_storage`` is called
    with every storage that is made from a buffer. The caller of each method holds the trace's lock.
    """

    epoch: int
    cur: Entry
    inputs: list[HeldBuffer]
    input_vids: dict[int, int]
    input_storages: list[int]
    touched: list[Storage]
    floats: list[float]
    ints: list[int]
    region: ForeignObject = None
    graph_name: str | None = None
    forbidden: str | None = None
    unreadable: str | None = None
    noted_marks: dict[int, bool] | None = None
    root: Root
    entries: int
    eager_flush: bool = False
    body_recorder: BodyRecorder | None = None
    on_new_storage: Callable[[Storage], None] | None = None
    lock: AbstractContextManager[object]
    bare: AbstractContextManager[object]
    has_placeholders: bool = False
    flush: Callable[..., None]

    # -- swapping ------------------------------------------------------------------------------

    def step_record(self) -> StepRecord:
        """The step that is being recorded, to be continued with ``resuming``."""
        return StepRecord._make(_record_of(self))

    def resuming(self, record: StepRecord) -> Iterator[None]:
        """For ``indivisible.do``: continue another step."""
        return indivisible.storing(self, StepRecord._fields, record)

    def recording(self) -> Recording:
        """The step that is being recorded and its mode, to be continued with ``installing``."""
        return Recording(self.step_record(), RecordingMode._make(_mode_of(self)))

    def installing(self, recording: Recording) -> Iterator[None]:
        """For ``indivisible.do``: continue another step in its own mode."""
        step, mode = recording
        return itertools.chain(
            indivisible.storing(self, RecordingMode._fields, mode), self.resuming(step)
        )

    # -- rules ---------------------------------------------------------------------------------

    def forbid(self, reason: str | None) -> None:
        """From now on, raise an error with the text ``reason`` instead of running the step; None permits runs."""
        self.forbidden = reason

    def refuse_reads(self, reason: str | None) -> None:
        """From now on, raise an error with the text ``reason`` instead of reading values; None permits reads."""
        self.unreadable = reason

    def rules(self) -> Rules:
        """The rules that apply now, to be restored with ``obeying``."""
        return Rules(self.unreadable, self.forbidden, self.noted_marks)

    def obeying(self, rules: Rules) -> Iterator[None]:
        """For ``indivisible.do``: apply these rules from now on."""
        return indivisible.storing(self, Rules._fields, rules)

    def name_graph(self, name: str | None) -> None:
        """Name the programs that the thread records from now on, for debug output; None removes the name."""
        self.graph_name = name

    def region_state(self) -> RegionState:
        """The use of ``torch_xla.compile`` that the thread is inside, to be restored with ``entering``."""
        return RegionState(self.region, self.graph_name, self.forbidden)

    def entering(self, state: RegionState) -> Iterator[None]:
        """For ``indivisible.do``: put the thread inside another use of ``torch_xla.compile``, or outside of any."""
        return indivisible.storing(self, RegionState._fields, state)

    def tell_of_storages(self, listener: Callable[[Storage], None] | None) -> None:
        """From now on, call ``listener`` with every storage that is made from a buffer; None stops this."""
        self.on_new_storage = listener

    def expect_placeholders(self) -> None:
        """Note that steps may depend on tensors without a value from now on."""
        self.has_placeholders = True

    def flush_as_operators(self, single: bool) -> None:
        """Run what is pending; ``single`` says that it is one operator that runs as a program of its own."""
        try:
            try:
                self.eager_flush = single
                self.flush(self)
            finally:
                self.eager_flush = False
        finally:
            self.eager_flush = False  # again, in case an exception interrupted the line above
