"""The storage of an ``xla`` tensor, and the chain of views through which the tensor shows it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from xla_core.contract.device_protocol import Buffer, DeviceClient, Placement
from xla_core.contract.foreign_values import CoreTrace, ForeignObject
from xla_core.operators.plan import Plan
from xla_core.operators.target import Target
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Root
from xla_core.recording.program_layout import Layout
from xla_core.support import indivisible
from xla_core.torch_bridge.operands import Operands

HeldBuffer: TypeAlias = Buffer | ForeignObject
"""A buffer, an object that stands for one (a placeholder, or an awaited, padded or host value), or None."""


class StorageState(NamedTuple):
    """What a storage holds at one moment."""

    vid: int
    epoch: int
    buffer: HeldBuffer
    version: int


class Storage:
    """The current value of a tensor, shared by its views, ``detach()`` and ``.data``.

    ``meta`` has its shape and dtype. The value is either pending or materialised. While ``epoch`` equals the
    trace's, ``vid`` is the number of the value in that trace. Otherwise ``buffer`` holds the value in device
    memory; None means that the tensor has not been written to (``torch.empty``). ``version`` counts writes, so
    that views know whether the value they read last is still valid. ``annotation`` exists only if an extension
    has set it: its own data about this tensor. ``varying`` exists only if the user has marked dimensions: it maps
    them to the largest sizes that they may have, or None. ``_extremes`` exists only if integers were uploaded.
    """

    __slots__ = (
        "trace", "meta", "vid", "epoch", "buffer", "version", "annotation", "varying", "_extremes",
        "__weakref__",
    )  # fmt: skip
    annotation: ForeignObject
    varying: dict[int, int | None]
    _extremes: tuple[weakref.ref[object], int, int] | None

    # ``trace`` is a Trace, whose module imports this one
    def __init__(self, trace: CoreTrace, meta: TensorMeta, vid: int, epoch: int) -> None:
        self.trace = trace
        self.meta = meta
        self.vid = vid
        self.epoch = epoch
        self.buffer: HeldBuffer = None
        self.version = 0

    def state(self) -> StorageState:
        """The current state, for ``restore``."""
        return StorageState(self.vid, self.epoch, self.buffer, self.version)

    def restore(self, state: StorageState) -> None:
        """Return to an earlier state."""
        self.vid, self.epoch, self.buffer, self.version = state

    def is_pending_in(self, epoch: int) -> bool:
        """Whether the step of ``epoch`` computes the value; ``Trace.is_pending`` considers all steps."""
        return self.buffer is None and self.epoch == epoch

    def bind(self, buffer: HeldBuffer) -> None:
        """Store the buffer of the current value, which was pending or unwritten."""
        indivisible.do(indivisible.storing(self, ("buffer", "epoch"), (buffer, -1)))

    def replace(self, buffer: HeldBuffer) -> None:
        """Take the value in ``buffer`` in place of the current one: a write, which views see."""
        self.version += 1
        self.bind(buffer)

    def touch(self) -> None:
        """Make views of this storage read their values again."""
        self.version += 1

    def relocate(self, buffer: HeldBuffer) -> None:
        """Hold the same value in another buffer, on other devices or in another layout."""
        self.buffer = buffer

    def annotate(self, annotation: object) -> None:
        """Attach an extension's data about this tensor."""
        self.annotation = annotation

    def mark_varying(self, dim: int, most: int | None) -> None:
        """Mark a dimension as changing from step to step; ``most`` is its largest size, or None."""
        self.varying = {**getattr(self, "varying", {}), dim: most}

    def note_extremes(self, smallest: int, largest: int) -> None:
        """Remember the smallest and the largest number of the value in the present buffer."""
        self._extremes = (weakref.ref(self.buffer), smallest, largest)

    def replace_by(self, fresh: Storage) -> None:
        """Take the value of another storage that has a buffer: a write, which views see."""
        self.replace(fresh.buffer)
        self._extremes = getattr(fresh, "_extremes", None)

    def known_extremes(self) -> tuple[int, int] | None:
        """The smallest and the largest number of the current value, if they were noted for its buffer."""
        noted = getattr(self, "_extremes", None)
        if noted is None or self.buffer is None or noted[0]() is not self.buffer:
            return None
        return noted[1:]


def binding(storages: Sequence[Storage], buffers: Iterable[object]) -> Iterator[None]:
    """For ``indivisible.do``: give each storage the buffer of its pending value, at the end of its step.

    ``buffers`` are taken one by one. The step must be renewed by the same ``indivisible.do``: until then the
    storages look pending in it.
    """
    return indivisible.storing_each("buffer", storages, buffers)


def replacing(storages: Sequence[Storage], buffers: Iterable[object]) -> Iterator[None]:
    """For ``indivisible.do``: give each storage a new value, the one in its buffer (see ``replace``)."""
    return itertools.chain(binding(storages, buffers), leaving(storages))


def leaving(storages: Sequence[Storage]) -> Iterator[None]:
    """For ``indivisible.do``: separate storages from steps that have read them, which keep the value they read."""
    return itertools.chain(
        indivisible.storing_each("epoch", storages, itertools.repeat(-1)),
        indivisible.storing_each("version", storages, [s.version + 1 for s in storages]),
    )


class Loan:
    """The values of storages that a replayed step takes from run to run, without looking at the storages.

    While the loan is ``active``, ``written`` are the values of the storages that the step writes and ``read`` those
    of the storages that it only reads. Each of these refers to the loan in place of a buffer and has the class
    ``LentStorage``. Reading or replacing a buffer recalls the whole loan first. The caller of each method holds the
    trace's lock.
    """

    __slots__ = ("_storages", "active", "read", "written", "__weakref__")

    def __init__(self, storages: Iterable[Storage] = ()) -> None:
        # weak, as the storages refer to the loan: without a cycle, memory is free as soon as nothing needs it
        self._storages = list(map(weakref.ref, storages))
        self.active = False
        self.written: Sequence[HeldBuffer] = ()
        self.read: Sequence[HeldBuffer] = ()

    def renewing(self, written: Iterable[Sequence[HeldBuffer]]) -> Iterator[None]:
        """For ``indivisible.do``: hold new values, the one item of ``written``, which is taken at that time."""
        return indivisible.storing(self, ("written",), written)

    def beginning(
        self,
        storages: Sequence[Storage],
        written: Iterable[Sequence[HeldBuffer]],
        read: Sequence[HeldBuffer],
    ) -> Iterator[None]:
        """For ``indivisible.do``: lend the loan's ``storages``, first those that the step writes."""
        return itertools.chain(
            self.renewing(written),
            map(_set_buffer, storages, itertools.repeat(self)),
            indivisible.storing_each("__class__", storages, itertools.repeat(LentStorage)),
            indivisible.storing(self, ("read", "active"), (read, True)),
        )

    def recall(self) -> None:
        """Give each storage its buffer; without effect if the loan is not active."""
        if not self.active:
            return
        values = itertools.chain(self.written, self.read)
        known = zip((one() for one in self._storages), values, strict=True)
        alive = [(s, buffer) for s, buffer in known if s is not None]
        storages = [s for s, _ in alive]
        indivisible.do(
            map(_set_buffer, storages, [buffer for _, buffer in alive]),
            indivisible.storing_each("__class__", storages, itertools.repeat(Storage)),
            indivisible.storing(self, ("active", "written", "read"), (False, (), ())),
        )


_buffer_slot: Final = vars(Storage)["buffer"]
_get_buffer: Final = _buffer_slot.__get__
_set_buffer: Final = _buffer_slot.__set__


class LentStorage(Storage):
    """The class of a storage while it is lent (see ``Loan``)."""

    __slots__ = ()

    @property
    def buffer(self) -> HeldBuffer:  # type: ignore[override]
        """The buffer of the current value."""
        _recall(self)
        return self.buffer  # the slot: a storage that is recalled has its own class again

    @buffer.setter
    def buffer(self, buffer: HeldBuffer) -> None:
        _recall(self)
        self.buffer = buffer


def _recall(storage: Storage) -> None:
    with storage.trace.bare:
        held = _get_buffer(storage)
        if type(held) is Loan:  # otherwise another thread has recalled it
            held.recall()


MSG_NEVER_COMPUTED: Final = (
    "this tensor's value was never computed, because a step that it needs failed: {error}"
)


class Placeholder:
    """Stands in for the buffer of a tensor without a value, which can be computed with but never read."""

    __slots__ = ()


MSG_PLACEHOLDER: Final = (
    "a placeholder tensor has no value: it stands for an argument while a computation is recorded"
)
PLACEHOLDER: Final = Placeholder()


class NoValueError(RuntimeError):
    """A tensor has no value, because it never had one or because it was donated; the message says why."""


class PoisonedValue(int):
    """Replaces the value number of a storage, and holds the error that reading its value raises."""

    error: Exception

    def __new__(cls, error: Exception) -> PoisonedValue:
        """Makes a value number that no value has."""
        number = super().__new__(cls, -1)
        number.error = error
        return number


# The epoch of a storage whose value is poisoned; no trace ever has it.
_NEVER: Final = -2


def poisoning(storage: Storage, error: Exception) -> Iterator[None]:
    """The work of ``poison``, for ``indivisible.do``."""
    values = (None, _NEVER, PoisonedValue(error))
    return indivisible.storing(storage, ("buffer", "epoch", "vid"), values)


def poison(storage: Storage, error: Exception) -> None:
    """Take the value of a storage away; reading it raises ``error`` from now on (``raise_if_poisoned``)."""
    indivisible.do(poisoning(storage, error))


def raise_if_poisoned(storage: Storage) -> None:
    """Raise RuntimeError if a storage without a buffer is poisoned, and not just unwritten."""
    if isinstance(storage.vid, PoisonedValue):
        error = storage.vid.error
        if isinstance(error, NoValueError):
            raise NoValueError(str(error))
        raise never_computed(error) from error


def never_computed(error: Exception) -> RuntimeError:
    """The error of reading a value that was never computed because of ``error``."""
    return RuntimeError(MSG_NEVER_COMPUTED.format(error=error))


class View:
    """One view operation on a storage (``parent`` None) or on another view.

    ``tail`` holds the operation's arguments as they stand in a step key, ``args`` as the user
    gave them. ``vid`` is the value read last, valid while ``epoch`` and ``version`` both agree.
    """

    __slots__ = ("parent", "plan", "tail", "args", "meta", "vid", "epoch", "version")

    def __init__(
        self,
        parent: View | None,
        plan: Plan,
        tail: Operands,
        args: Operands,
        meta: TensorMeta,
        vid: int,
        epoch: int,
        version: int,
    ) -> None:
        self.parent = parent
        self.plan = plan
        self.tail = tail
        self.args = args
        self.meta = meta
        self.vid = vid
        self.epoch = epoch
        self.version = version

    def show(self, vid: int, epoch: int, version: int) -> None:
        """Note that this view of its storage's ``version`` is value ``vid`` of the step of ``epoch``."""
        self.vid, self.epoch, self.version = vid, epoch, version


def chain(view: View | None) -> list[View]:
    """The views from the storage outwards, ending with ``view``."""
    views = []
    while view is not None:
        views.append(view)
        view = view.parent
    views.reverse()
    return views


class Recorder(Protocol):
    """The parts of a ``Trace`` that storages and backends need.

    ``inputs`` are the buffers that the step reads, ``touched`` the storages that it has read or written.
    ``input_storages`` gives the position of each input's storage in ``touched``, ``input_vids`` the slots of inputs
    by value number. ``thread`` is the number of the thread whose step is here (see ``step_turns``).
    """

    device: torch.device
    backend: Backend
    lock: AbstractContextManager[object]
    flush: Callable[..., None]
    root: Root
    cur: Entry
    epoch: int
    inputs: list[HeldBuffer]
    input_vids: dict[int, int]
    input_storages: list[int]
    touched: list[Storage]
    forbidden: str | None
    body_recorder: BodyRecorder | None
    thread: int

    def reset(self) -> None:
        """Begin a new step."""
        ...

    def step_record(self) -> object:
        """The state of the step that is being recorded, see ``step_record``."""
        ...


class Backend(Protocol):
    """Placement and transfers of one device, or of a mesh that is shown as one device.

    Buffers are objects of the client. ``replicas`` are the ids of the job's replicas in ordinal order, empty if
    there is only this one. ``shapes_only`` says that buffers have no values (ahead-of-time compilation).
    ``may_defer`` says that steps may wait in ``queue`` for their programs. ``runs_counter`` and ``runs_metric``
    name the counter of its runs and the metric of their times. ``virtual_name`` is the device name of a mesh.
    """

    client: DeviceClient
    index: int
    placement: Placement
    platform: str
    target: Target
    shapes_only: bool
    replicas: tuple[int, ...]
    formats: Mapping[np.dtype, np.dtype]
    numpy_dtype: Callable[[np.dtype], np.dtype]
    last_program: object
    queue: ForeignObject
    may_defer: bool
    runs_counter: str
    runs_metric: str
    virtual_name: str | None

    def put(self, array: np.ndarray) -> Buffer:
        """Copy a host array to the device, in the dtype in which the device keeps it."""
        ...

    def put_numbers(self, array: np.ndarray) -> Buffer:
        """Copy lifted numbers to the device, without the user's number formats, which are for tensors only."""
        ...

    def get(self, buffer: HeldBuffer) -> np.ndarray:
        """Wait for a buffer and copy it to the host."""
        ...

    def input_layouts(self, trace: Recorder) -> Hashable:
        """The layouts of the step's inputs, as part of its program's identity. Called for every step."""
        ...

    def argument_layouts(self, storages: Iterable[Storage]) -> Hashable:
        """The layouts of the tensors that a recorded graph is called with, as part of its identity."""
        ...

    def sharding_text(self, storage: Storage) -> str | None:
        """The sharding of a tensor as HLO text; None if it is not split."""
        ...

    def shard_count(self) -> int:
        """The number of parts that a tensor is split into: one per device."""
        ...

    def device_buffer(self, storage: Storage) -> Buffer:
        """The buffer of a tensor that has a value, as programs take it."""
        ...

    def buffer_for_copy(self, storage: Storage, buffer: HeldBuffer) -> HeldBuffer:
        """The buffer to bind to ``storage`` when ``copy_`` makes it share another tensor's value, ``buffer``."""
        ...

    def layout(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
    ) -> Layout:
        """The layout of the program to be made of ``entries``, the step of ``trace``.

        ``outputs`` are the numbers of the values that it computes, ``aliases`` the pairs of the slot of an input
        and the position of the output that may reuse its memory.
        """
        ...

    def allocate(self, meta: TensorMeta) -> Buffer:
        """A buffer of zeros for a tensor of this shape and dtype."""
        ...

    def copy(self, buffer: HeldBuffer) -> Buffer:
        """A second buffer with the same value on this device."""
        ...

    def copy_from(self, buffer: HeldBuffer, origin: Backend) -> Buffer:
        """A buffer on this device with the value of another device's buffer."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether the device reports that much free memory; always True for small sizes."""
        ...

    def launched(self, results: Sequence[HeldBuffer]) -> None:
        """Remember the results of the last program for ``wait``, without keeping a buffer alive."""
        ...

    def wait(self) -> None:
        """Block until the last program has finished."""
        ...


class BodyRecorder(Protocol):
    """The recorder of a computation's body: what the trace tells it while the step waits for the body."""

    def note_input(self, s: Storage) -> None:
        """Called when ``s`` becomes an input of the body."""
        ...

    def note_created(self, s: Storage) -> None:
        """Called when ``s`` is created from a buffer while the body is recorded."""
        ...
