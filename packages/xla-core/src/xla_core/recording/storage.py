"""What an ``xla`` tensor holds: a storage, and the chain of views through which it looks at it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from xla_core.contract.device_protocol import DeviceClient, Placement
from xla_core.operators.plan import Plan
from xla_core.operators.target import Target
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Root
from xla_core.recording.program_layout import Layout
from xla_core.support import indivisible


class StorageState(NamedTuple):
    """What a storage holds at one moment."""

    vid: int
    epoch: int
    buffer: Any
    version: int


class Storage:
    """The current value of a tensor, shared by its views, ``detach()`` and ``.data``.

    ``meta`` has its shape and dtype. A value is either pending or materialised. While ``epoch`` equals the
    trace's, ``vid`` is the number of the value in that trace. Otherwise ``buffer`` holds the value in device
    memory; None is a tensor that nobody has written to yet (``torch.empty``). ``version`` counts writes, so
    that views know whether what they read last is still true. ``annotation`` is not there unless an extension
    sets it: what it knows of this one tensor. Nor is ``varying`` unless the user marks dimensions: these, and
    the largest sizes that they may have, or None.
    """

    __slots__ = (
        "trace", "meta", "vid", "epoch", "buffer", "version", "annotation", "varying", "__weakref__",
    )  # fmt: skip
    annotation: Any
    varying: dict[int, int | None]

    # Any: a Trace, which is made of storages
    def __init__(self, trace: Any, meta: TensorMeta, vid: int, epoch: int) -> None:
        self.trace = trace
        self.meta = meta
        self.vid = vid
        self.epoch = epoch
        self.buffer: Any = None
        self.version = 0

    def state(self) -> StorageState:
        """What it holds now, for ``restore``."""
        return StorageState(self.vid, self.epoch, self.buffer, self.version)

    def restore(self, state: StorageState) -> None:
        """Hold what it held then."""
        self.vid, self.epoch, self.buffer, self.version = state

    def is_pending_in(self, epoch: int) -> bool:
        """Whether the step of ``epoch`` computes the value; ``Trace.is_pending`` asks for any step."""
        return self.buffer is None and self.epoch == epoch

    def bind(self, buffer: Any) -> None:
        """Hold the value in ``buffer``, for the value that it stands for now, pending or unwritten."""
        indivisible.do(indivisible.storing(self, ("buffer", "epoch"), (buffer, -1)))

    def replace(self, buffer: Any) -> None:
        """Hold another value, that in ``buffer``: a write, which views see."""
        self.version += 1
        self.bind(buffer)

    def touch(self) -> None:
        """Views of it read again what they show."""
        self.version += 1

    def relocate(self, buffer: Any) -> None:
        """Hold the same value in another buffer, on other devices or laid out otherwise."""
        self.buffer = buffer

    def annotate(self, annotation: object) -> None:
        """Keep with the tensor what an extension knows of it."""
        self.annotation = annotation

    def mark_varying(self, dim: int, most: int | None) -> None:
        """Say that a dimension has another size from step to step, up to ``most`` if that is not None."""
        self.varying = {**getattr(self, "varying", {}), dim: most}


def binding(storages: Sequence[Storage], buffers: Iterable[object]) -> Iterator[None]:
    """For ``indivisible.do``: let each storage hold the value in its buffer, as its step ends.

    ``buffers`` are taken one by one. The step must be renewed in the same series: till then the storages
    look pending in it.
    """
    return indivisible.storing_each("buffer", storages, buffers)


def replacing(storages: Sequence[Storage], buffers: Iterable[object]) -> Iterator[None]:
    """For ``indivisible.do``: let each storage hold another value, that in its buffer (``replace``)."""
    return itertools.chain(binding(storages, buffers), leaving(storages))


def leaving(storages: Sequence[Storage]) -> Iterator[None]:
    """For ``indivisible.do``: steps that have read these storages go on with the value that they read."""
    return itertools.chain(
        indivisible.storing_each("epoch", storages, itertools.repeat(-1)),
        indivisible.storing_each("version", storages, [s.version + 1 for s in storages]),
    )


MSG_NEVER_COMPUTED: Final = (
    "this tensor's value was never computed, because a step that it needs failed: {error}"
)


class Placeholder:
    """In place of the buffer of a tensor that has no value: it may be computed with, never read."""

    __slots__ = ()


MSG_PLACEHOLDER: Final = (
    "a placeholder tensor has no value: it stands for an argument while a computation is written "
    "down"
)
PLACEHOLDER: Final = Placeholder()


class NoValueError(RuntimeError):
    """A tensor has no value, and the message says why: it never had one here, or gave it away."""


class PoisonedValue(int):
    """In place of the value number of a storage: the error that reading its value raises."""

    error: Exception

    def __new__(cls, error: Exception) -> PoisonedValue:
        """A value number that no value has."""
        number = super().__new__(cls, -1)
        number.error = error
        return number


# The epoch of a storage whose value is poisoned; no trace has it.
_NEVER: Final = -2


def poisoning(storage: Storage, error: Exception) -> Iterator[None]:
    """For ``indivisible.do``: what ``poison`` does."""
    values = (None, _NEVER, PoisonedValue(error))
    return indivisible.storing(storage, ("buffer", "epoch", "vid"), values)


def poison(storage: Storage, error: Exception) -> None:
    """Let a storage have no value from now on; reading it raises ``error``, see ``raise_if_poisoned``."""
    indivisible.do(poisoning(storage, error))


def raise_if_poisoned(storage: Storage) -> None:
    """Raise RuntimeError when the value of a storage without a buffer is poisoned, not just unwritten."""
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
        tail: tuple[Any, ...],
        args: tuple[Any, ...],
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
        """Let this look at its storage's ``version`` be value ``vid`` of the step of ``epoch``."""
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
    """What a storage and a backend need of the trace that records on a device.

    ``inputs`` are the buffers that the step reads, ``touched`` the storages that it has met;
    ``input_storages`` gives the position among these of each input's, ``input_vids`` the slots by value
    number. ``thread`` is whose turn it is and ``parked`` what the other threads have recorded, see
    ``step_turns``.
    """

    device: torch.device
    backend: Backend
    lock: Any
    flush: Callable[..., None]
    root: Root
    cur: Entry
    epoch: int
    inputs: list[Any]
    input_vids: dict[int, int]
    input_storages: list[int]
    touched: list[Storage]
    forbidden: str | None
    aside: Aside | None
    thread: int
    parked: dict[int, Any]
    turns: Any

    def reset(self) -> None:
        """Begin a new step."""
        ...

    def step_record(self) -> object:
        """The step that is recorded now, see ``step_record``."""
        ...

    def resuming(self, record: Any) -> Iterator[None]:
        """For ``indivisible.do``: go on with another step."""
        ...


class Backend(Protocol):
    """Placement and transfers of one device, or of a mesh that is shown as one device.

    Buffers are the client's objects. ``replicas`` are the ids of the job's replicas in ordinal order, empty
    where this one is alone; ``shapes_only`` says that buffers have no values (ahead of time).
    ``may_defer`` says that steps may wait in ``queue`` for their programs.
    ``runs_counter`` and ``runs_metric`` count its programs' runs and their times. ``virtual_name`` is what a
    mesh is called as a device.
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
    queue: Any
    may_defer: bool
    runs_counter: str
    runs_metric: str
    virtual_name: str | None

    def put(self, array: np.ndarray) -> Any:
        """Copy a host array to the device, in the dtype the device keeps."""
        ...

    def put_numbers(self, array: np.ndarray) -> object:
        """Copy lifted numbers to the device: the user's number formats are for tensors only."""
        ...

    def get(self, buffer: Any) -> np.ndarray:
        """Wait for a buffer and copy it to the host."""
        ...

    def input_layouts(self, trace: Recorder) -> Hashable:
        """How the step's inputs are laid out: part of its program's identity. Called for every step."""
        ...

    def argument_layouts(self, storages: Iterable[Storage]) -> Hashable:
        """How tensors are laid out that a recorded graph is called with: part of what it is for."""
        ...

    def sharding_text(self, storage: Storage) -> str | None:
        """How a tensor is split over the devices, as HLO text; None where it is not."""
        ...

    def shard_count(self) -> int:
        """Into how many parts a tensor is split: one per device."""
        ...

    def device_buffer(self, storage: Storage) -> object:
        """The buffer of a tensor that has a value, as programs take it."""
        ...

    def buffer_for_copy(self, storage: Storage, buffer: Any) -> object:
        """The buffer to bind to ``storage`` when ``copy_`` makes it share another tensor's value, ``buffer``."""
        ...

    def layout(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
    ) -> Layout:
        """The layout of a program that is about to be made of ``entries``, the step of ``trace``.

        ``outputs`` are the numbers of the values that it computes, ``aliases`` pairs of the slot of an input
        and the position of the output that may take over its memory.
        """
        ...

    def allocate(self, meta: TensorMeta) -> Any:
        """A buffer of zeros for a tensor of this shape and dtype."""
        ...

    def copy(self, buffer: Any) -> Any:
        """A second buffer with the same value on this device."""
        ...

    def copy_from(self, buffer: Any, origin: Backend) -> object:
        """The value of another device's buffer, on this device."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether the device has so much memory left, as far as it tells; little is always there."""
        ...

    def launched(self, results: Sequence[Any]) -> None:
        """Remember what the last program will produce, for ``wait``; keeps no buffer alive."""
        ...

    def wait(self) -> None:
        """Block until the last program has finished."""
        ...


class Aside(Protocol):
    """Who records the body of a computation, aside from the step."""

    def captures(self, s: Storage) -> None:
        """``s`` becomes an input of the body."""
        ...

    def made(self, s: Storage) -> None:
        """``s`` was made from a buffer while the body is recorded."""
        ...
