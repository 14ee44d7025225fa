"""What this process did last: a ring of records, always on, for reports of hangs and failures.

A record is made once per step, program, transfer, wait and collective, never per operator: a list, an append to
a ring that drops the oldest, and at the end of what takes time one number put into it. Nothing is
rendered before a report is made.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Final, NamedTuple

from xla_core.contract.foreign_values import JsonValue
from xla_core.support import caches

__all__ = [
    "COLLECTIVE",
    "COMPILE",
    "FETCH",
    "LAUNCH",
    "LEAST_STEPS",
    "MEET",
    "RUNNING",
    "Record",
    "SEND",
    "SLOTS",
    "STEP",
    "StepTimes",
    "WAIT",
    "WRITE",
    "begin",
    "describe",
    "end",
    "newest",
    "note",
    "oldest_running",
    "programs",
    "records",
    "step",
    "step_times",
    "tell_program",
    "waited",
    "wall_clock",
]

SLOTS: Final = 1024
"""The number of records that are kept."""
_STEPS: Final = 64

LAUNCH: Final = "launch"
COMPILE: Final = "compile"
SEND: Final = "send"
FETCH: Final = "fetch"
WAIT: Final = "wait"
STEP: Final = "step"
COLLECTIVE: Final = "collective"
MEET: Final = "meet"
WRITE: Final = "write"
"""Kinds: a program was enqueued, made, a tensor copied to the device or to the host, the host waited for the
device, the user ended a step, collectives were launched, the host waited for other processes, a checkpoint was
written. MEET in several processes for the same is one meeting: who has none of it, or writes it, is waited for."""

RUNNING: Final = -1
"""The nanoseconds of what has not ended."""

Record = list[JsonValue]
"""Kind, beginning (``perf_counter_ns``), nanoseconds or RUNNING, thread, what, and how much of it."""


class _Clock:
    """How many steps have ended, and how long the host has waited and compiled in all, in nanoseconds."""

    __slots__ = ("built", "steps", "waited")

    def __init__(self) -> None:
        self.steps = self.waited = self.built = 0


# An object: assigning to a class's attribute costs four times as much.
_clock: Final = _Clock()
_ring: Final[collections.deque[Record]] = collections.deque(maxlen=SLOTS)
_append: Final = _ring.append
# The end of each of the last steps: when, and what the clock said then.
_ends: Final[collections.deque[tuple[int, int, int]]] = collections.deque(maxlen=_STEPS)
_end_of_step: Final = _ends.append
_collectives: Final[caches.Bounded[str, list[dict[str, object]]]] = caches.Bounded(
    "collectives of programs", 1024
)


def begin(kind: str, what: object, amount: object = 0) -> Record:
    """Something that takes time begins; give the record to ``end`` or ``waited``, which end it.

    ``what`` and ``amount`` are kept unchanged until a report is made, so they must be small.
    """
    record = [kind, perf_counter_ns(), RUNNING, get_ident(), what, amount]
    _append(record)
    return record


def end(record: Record) -> int:
    """What began has ended; the nanoseconds that it took."""
    took: int = perf_counter_ns() - record[1]
    record[2] = took
    if record[0] is COMPILE:
        _clock.built += took
    return took


def waited(record: Record) -> int:
    """Note that the host has waited, for the device or for others, since ``record`` began; the nanoseconds.

    A launch counts as waiting, too: some devices run programs in it, and wait there for others.
    """
    took: int = perf_counter_ns() - record[1]
    record[2] = took
    _clock.waited += took
    return took


def describe(record: Record, what: object, amount: object) -> None:
    """Say of something that began what it was, and how much of it, once that is known."""
    record[4:] = what, amount


def note(kind: str, what: object, amount: object = 0) -> None:
    """Something happened that takes no time."""
    _append([kind, perf_counter_ns(), 0, get_ident(), what, amount])


def step() -> None:
    """The user ended a step."""
    clock = _clock
    clock.steps = steps = clock.steps + 1
    now = perf_counter_ns()
    _append([STEP, now, 0, get_ident(), steps, 0])
    _end_of_step((now, clock.waited, clock.built))


def tell_program(name: str, collectives: list[dict[str, object]]) -> None:
    """What each run of the program ``name`` does between devices, for reports of who launched it; when it is made.

    A row has ``kind``, ``count``, ``bytes``, ``groups`` and ``line``.
    """
    _collectives.keep(name, collectives)


def programs(of: Sequence[Record]) -> dict[str, list[dict[str, object]]]:
    """What was told of the programs launched in these records, by name."""
    names = dict.fromkeys(record[4] for record in of if record[0] == LAUNCH)
    return {name: _collectives[name] for name in names if _collectives.get(name)}


def records() -> list[Record]:
    """The records kept, oldest first, as they are at this moment."""
    while True:
        try:
            return [list(record) for record in _ring]
        except RuntimeError:  # another thread has appended meanwhile
            continue


def newest() -> Record | None:
    """The last record."""
    try:
        return _ring[-1]
    except IndexError:
        return None


def oldest_running(kind: str) -> Record | None:
    """The record of a kind that has not ended for longest, itself; None where there is none among those kept."""
    while True:
        try:
            return next((r for r in _ring if r[0] is kind and r[2] == RUNNING), None)
        except RuntimeError:  # another thread has appended meanwhile
            continue


class StepTimes(NamedTuple):
    """How the last steps went, in seconds: ``usual`` and ``own`` are medians, None before there are some.

    ``own`` is the part of a step outside of launches and waits. ``since`` is how long ago the last of
    ``ended`` steps has. Steps in which a program was compiled do not count as usual.
    """

    ended: int
    since: float
    usual: float | None
    own: float | None


LEAST_STEPS: Final = 8
"""The number of steps after which it is known what is usual."""


def step_times() -> StepTimes:
    """The times of this process's last steps."""
    ends = list(_ends)
    since = (perf_counter_ns() - ends[-1][0]) / 1e9 if ends else 0.0
    steps = [
        (later[0] - former[0], later[0] - former[0] - (later[1] - former[1]))
        for former, later in itertools.pairwise(ends)
        if later[2] == former[2]
    ]
    if len(steps) < LEAST_STEPS:
        return StepTimes(_clock.steps, since, None, None)
    usual, own = (_median(values) / 1e9 for values in zip(*steps, strict=True))
    return StepTimes(_clock.steps, since, usual, own)


def _median(values: Sequence[int]) -> float:
    return float(sorted(values)[len(values) // 2])


def wall_clock(moment: int) -> float:
    """The time of day, as ``time.time()`` says it, at ``perf_counter_ns`` ``moment``."""
    return time.time() - (perf_counter_ns() - moment) / 1e9
