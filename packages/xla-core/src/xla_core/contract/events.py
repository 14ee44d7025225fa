"""Events: what the core tells listeners, where something rare happens.

Each kind is a class below. A listener that subscribes to a class gets its instances; one that subscribes to
``Event`` gets all of them. Times are nanoseconds. What a listener raises is raised where the event happened.
Nothing is emitted per operator.

Fields of torch's and the core's own kinds are ``Any`` here, where neither is imported: ``trace`` is a ``Trace``
and ``entries`` are ``Entry`` objects (``extension_api.steps``), ``program`` is a ``StepProgram``
(``extension_api.programs``), ``device`` a ``torch.device``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from xla_core.contract.device_protocol import Buffer, Program

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
    """Anything that happened."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramMissing(Event):
    """A step that no known program computes; emitted before anything is lowered.

    Raising here refuses it, the trace stays as it was. ``entries`` are the step's operations in ``trace``; ``name``
    is the step's for people, ``digest`` for caches. ``outputs`` are the numbers of the wanted values, ``aliases``
    pairs of an input and the output that gets its memory.
    """

    trace: Any
    name: str
    digest: str
    entries: Sequence[Any]
    outputs: tuple[int, ...]
    aliases: Sequence[tuple[int, int]]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramCompiled(Event):
    """The program of a step was compiled.

    ``entries`` are the step's operations in ``trace``, ``digest`` identifies them, and ``program`` is what
    computes them. ``modules`` are what the compiler was given, one per stage; ``lowering`` and ``compiling``
    are nanoseconds.
    """

    trace: Any
    program: Any
    digest: str
    entries: Sequence[Any]
    modules: Sequence[Program]
    lowering: int
    compiling: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramLoaded(Event):
    """The program of a step came from the persistent cache.

    ``entries`` are the step's operations in ``trace``, ``digest`` identifies them; ``loading`` is in nanoseconds.
    """

    trace: Any
    program: Any
    digest: str
    entries: Sequence[Any]
    loading: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramEvicted(Event):
    """A program was forgotten to make room for others; the next step that needs it makes it again."""

    program: Any


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class StepsForgotten(Event):
    """All steps recorded on a device are about to be dropped."""

    trace: Any


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RunRequested(Event):
    """A run was asked for: it is enqueued now, or waits for its program, which is still being compiled."""

    trace: Any
    program: Any


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ProgramExecuted(Event):
    """A run was enqueued. While anybody listens to this, no run waits for its program.

    ``trace`` is a copy, as it was before: its tensors have their values, and what is recorded now is no part of
    it. It is at the beginning of a step, without entries, if no step of it ran, but a graph of ``torch.compile`` or
    a captured step. ``results`` are the buffers, ``nanoseconds`` is the host's time to enqueue the run.
    """

    trace: Any
    program: Any
    results: Sequence[Buffer]
    nanoseconds: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ExecutionRefused(Event):
    """Something would run where a block forbids it (``torch_xla.compile(full_graph=True)``).

    The error is raised next.
    """

    trace: Any


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Flushed(Event):
    """What was pending on ``trace`` was run: ``operations`` of them.

    ``nanoseconds`` are the host's, with everything above: compiling, loading, enqueuing.
    """

    trace: Any
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
    """An operator ran on the CPU, asked for at the user's ``filename`` and ``line``.

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

    device: Any


E = TypeVar("E", bound=Event)
"""A kind of event, in the types of ``subscribe`` and of functions around it."""
_subscriptions: list[tuple[type[Event], Callable[[Any], None]]] = []


class _Known:
    """What follows from the subscriptions, for each kind that was asked for since they changed.

    Another table after each change: a thread that has just read the former ones writes to the old table.
    """

    listeners: dict[type[Event], tuple[Callable[[object], None], ...]] = {}


class Events(Protocol):
    """What an extension is handed to subscribe with: this module."""

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> Callable[[], None]:
        """See ``subscribe``."""
        ...


def subscribe(kind: type[E], listener: Callable[[E], None]) -> Callable[[], None]:
    """Call ``listener(event)`` for every event of this kind; returns a function that ends it.

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


def _listeners_of(kind: type[Event]) -> tuple[Callable[[Any], None], ...]:
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
    """Whether there is a listener of this kind: ask before you compute what only the event needs."""
    return bool(_listeners_of(kind))
