"""Events that the core sends to listeners when something rare happens.

Each kind is a class below. A listener that subscribes to a class gets its instances; one that subscribes to
``Event`` gets all of them. Times are nanoseconds. What a listener raises is raised where the event happened.
Nothing is emitted per operator.

Fields of torch's and the core's own kinds have no classes here, where neither is imported: ``trace`` is a ``Trace``
and ``entries`` are ``Entry`` objects (``extension_api.steps``), ``program`` is a ``StepProgram``
(``extension_api.programs``), ``device`` a ``torch.device``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from xla_core.contract.device_protocol import Buffer, Program
from xla_core.contract.foreign_values import (
    AnyFunction,
    CoreEntry,
    CoreProgram,
    CoreTrace,
    ForeignObject,
)

__all__ = [
    "E",
    "Event",
    "Events",
    "ExecutionRefused",
    "Fallback",
    "Flushed",
    "ProgramCompiled",
    "ProgramEvicted",
    "ProgramExecuted",
    "ProgramLoaded",
    "ProgramMissing",
    "RunRequested",
    "StepMarked",
    "StepsForgotten",
    "TransferFromDevice",
    "TransferToDevice",
    "Waited",
    "emit",
    "listening",
    "subscribe",
]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Event:
    """The base class of all events."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramMissing(Event):
    """A step has no compiled program yet; emitted before it is lowered.

    Raising here refuses it, the trace stays as it was. ``entries`` are the step's operations in ``trace``; ``name``
    is the step's for people, ``digest`` for caches. ``outputs`` are the numbers of the wanted values, ``aliases``
    pairs of an input and the output that gets its memory.
    """

    trace: CoreTrace
    name: str
    digest: str
    entries: Sequence[CoreEntry]
    outputs: tuple[int, ...]
    aliases: Sequence[tuple[int, int]]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramCompiled(Event):
    """The program of a step was compiled.

    ``entries`` are the step's operations in ``trace``, ``digest`` identifies them, and ``program`` is what
    computes them. ``modules`` are what the compiler was given, one per stage; ``lowering`` and ``compiling``
    are nanoseconds.
    """

    trace: CoreTrace
    program: CoreProgram
    digest: str
    entries: Sequence[CoreEntry]
    modules: Sequence[Program]
    lowering: int
    compiling: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramLoaded(Event):
    """The program of a step came from the persistent cache.

    ``entries`` are the step's operations in ``trace``, ``digest`` identifies them; ``loading`` is in nanoseconds.
    """

    trace: CoreTrace
    program: CoreProgram
    digest: str
    entries: Sequence[CoreEntry]
    loading: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramEvicted(Event):
    """A program was evicted from the cache; the next step that needs it compiles it again."""

    program: CoreProgram


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class StepsForgotten(Event):
    """All steps recorded on a device are about to be dropped."""

    trace: CoreTrace


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RunRequested(Event):
    """A run was requested: it is enqueued now, or once its program is compiled."""

    trace: CoreTrace
    program: CoreProgram


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramExecuted(Event):
    """A run of ``program`` was enqueued. While this event has a listener, no run waits for its compilation.

    ``trace`` is a copy, as it was before: its tensors have their values, and what is recorded now is no part of
    it. It is at the beginning of a step, without entries, if no step of it ran, but a graph of ``torch.compile`` or
    a captured step. ``results`` are the buffers, ``nanoseconds`` is the host's time to enqueue the run.
    """

    trace: CoreTrace
    program: CoreProgram
    results: Sequence[Buffer]
    nanoseconds: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ExecutionRefused(Event):
    """Something would run where a block forbids it (``torch_xla.compile(full_graph=True)``).

    The error is raised next.
    """

    trace: CoreTrace


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Flushed(Event):
    """The ``operations`` operations pending on ``trace`` were run.

    ``nanoseconds`` are the host's, with everything above: compiling, loading, enqueuing.
    """

    trace: CoreTrace
    operations: int
    nanoseconds: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class TransferToDevice(Event):
    """A host array of ``nbytes`` became ``buffer``, in ``nanoseconds``.

    ``array`` is what was sent. A listener must not keep it: its memory is the caller's.
    """

    buffer: Buffer
    array: object
    nbytes: int
    nanoseconds: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class TransferFromDevice(Event):
    """A buffer of ``nbytes`` was copied to the host, in ``nanoseconds``.

    ``waited`` is the part of that time until the buffer's value was computed.
    """

    nbytes: int
    nanoseconds: int
    waited: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Waited(Event):
    """The host waited for programs to finish."""

    nanoseconds: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Fallback(Event):
    """An operator without a lowering ran on the CPU, called at ``filename`` and ``line`` of the user's program.

    ``nanoseconds`` are all that it took: computing and fetching its operands, the operator itself, sending its
    results. It is told of when it raised, too.
    """

    operator: str
    filename: str
    line: int
    nanoseconds: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class StepMarked(Event):
    """The user ended a step."""

    device: ForeignObject


E = TypeVar("E", bound=Event)
"""The class of an event, as a type variable of ``subscribe`` and related functions."""
_subscriptions: list[tuple[type[Event], AnyFunction]] = []


class _Known:
    """The listeners of each kind of event, cached since the subscriptions last changed.

    Each change makes a new table, so that a thread that has read the old subscriptions writes to the old table.
    """

    listeners: dict[type[Event], tuple[Callable[[object], None], ...]] = {}


class Events(Protocol):
    """The type of the object that extensions subscribe through: this module."""

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> Callable[[], None]:
        """See ``subscribe``."""
        ...


def subscribe(kind: type[E], listener: Callable[[E], None]) -> Callable[[], None]:
    """Call ``listener(event)`` for every event of this kind; returns a function that unsubscribes it.

    ``Event`` is every kind. Listeners are called in the order in which they subscribed.
    """
    subscription = (kind, listener)
    _subscriptions.append(subscription)
    _Known.listeners = {}

    def unsubscribe() -> None:
        if subscription in _subscriptions:
            _subscriptions.remove(subscription)
            _Known.listeners = {}

    return unsubscribe


def _listeners_of(kind: type[Event]) -> tuple[Callable[[object], None], ...]:
    by_kind = _Known.listeners
    listeners = by_kind.get(kind)
    if listeners is None:
        listeners = tuple(
            listener for wanted, listener in _subscriptions if issubclass(kind, wanted)
        )
        by_kind[kind] = listeners
    return listeners


def emit(event: Event) -> None:
    """Call the listeners of this kind of event."""
    for listener in _listeners_of(type(event)):
        listener(event)


def listening(kind: type[Event]) -> bool:
    """Whether this kind of event has a listener; check it before computing values that only the event needs."""
    return bool(_listeners_of(kind))
