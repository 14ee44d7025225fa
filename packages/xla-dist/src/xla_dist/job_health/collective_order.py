"""Checks that all processes launch the same collectives in the same order.

A collective waits for the same collective of the other replicas. If they run a different one, the job
hangs, aborts or computes nonsense. Every process therefore keeps a log of the collectives that it has launched,
and publishes it through the coordinator. It does so immediately when a program runs for the first
time, or for the first time after another program, and that program then waits for the other processes' logs.
Otherwise the watchdog publishes the log twice a second, at no cost for the training loop. Processes of one
host also see each other's latest launches in shared memory (``launch_log``), even those of a process that has died.

Only the order of the collectives must agree, not the programs around them: one replica may
compute an additional value for its log, or end its step earlier. Logs are compared in pairs,
and only collectives that have both replicas in one group count.
"""

from __future__ import annotations

import collections
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from xla_core.extension_api import jobs
from xla_core.support import flight_ring
from xla_dist.job_health.launch_log import LaunchLog
from xla_dist.operators.primitives import Groups

LOG_FOLDER: Final = "xla/collectives/log"
PROGRAM_FOLDER: Final = "xla/collectives/program"
PLACES_FOLDER: Final = "xla/collectives/places"

# A log keeps this many runs of programs; older ones have been compared long ago.
_MOST_RUNS: Final = 256
# If steps are cut at different places, collectives are compared one by one: at most this many at a time.
_MOST_COMPARED: Final = 100_000

MSG_DIFFERENT: Final = (
    "the replicas run different programs: their collectives differ at number {position}.\n"
    "{first}\n{second}\n"
    "Every replica has to call the same collectives in the same order; look for a branch that "
    "depends on the ordinal, or on data, around the call."
)
_SIDE: Final = "  ordinal {ordinal}: {item}{at}{before}"


class Collectives:
    """The collectives of one program in order, each with a text and its replica groups.

    ``places`` are the user's lines that recorded them, which may differ between replicas.
    """

    __slots__ = ("digest", "items", "places", "_shared")

    def __init__(self, items: Sequence[tuple[str, Groups]], places: Sequence[str] = ()) -> None:
        self.items = tuple(items)
        self.places = tuple(places) or ("",) * len(self.items)
        self.digest = hashlib.sha256(repr(self.items).encode()).hexdigest()[:16]
        self._shared: dict[tuple[int, int], tuple[str, ...]] = {}

    def shared(self, a: int, b: int) -> tuple[str, ...]:
        """The collectives that have both replicas in one group."""
        texts = self._shared.get((a, b))
        if texts is None:
            texts = self._shared[a, b] = tuple(
                text for text, groups in self.items if any(a in g and b in g for g in groups)
            )
        return texts

    def place(self, a: int, b: int, index: int) -> str:
        """The line of the collective with this index in ``shared(a, b)``."""
        lines = [
            place
            for place, (_, groups) in zip(self.places, self.items, strict=True)
            if any(a in g and b in g for g in groups)
        ]
        return lines[index]

    def encode(self) -> bytes:
        """The form that other processes read."""
        return zlib.compress(json.dumps(self.items).encode())

    @classmethod
    def decode(cls, data: bytes) -> Collectives:
        """The inverse of ``encode``."""
        items = json.loads(zlib.decompress(data))
        return cls([(text, tuple(map(tuple, groups))) for text, groups in items])


class Log:
    """The programs that one replica has launched, as runs of equal programs; old runs are only counted."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.runs: collections.deque[tuple[Collectives, int]] = collections.deque()
        self.forgotten: collections.Counter[int] = collections.Counter()
        self.first = 0
        """The number of the oldest run that is kept."""

    @property
    def latest(self) -> int:
        """The number of the latest run."""
        return self.first + len(self.runs) - 1

    def append(self, program: Collectives) -> int:
        """Append one launch; returns its number in the latest run of equal programs."""
        if self.runs and self.runs[-1][0] is program:
            self.runs[-1] = (program, self.runs[-1][1] + 1)
        else:
            self._begin(program)
        return self.runs[-1][1]

    def _begin(self, program: Collectives) -> None:
        self.runs.append((program, 1))
        if len(self.runs) > _MOST_RUNS:
            old, times = self.runs.popleft()
            self.first += 1
            for other in {r for _, groups in old.items for g in groups for r in g}:
                self.forgotten[other] += times * len(old.shared(self.ordinal, other))

    def encode(self) -> bytes:
        """The form that other processes read; the programs themselves are published separately."""
        runs = [(program.digest, times) for program, times in self.runs]
        content = {"runs": runs, "first": self.first, "forgotten": self.forgotten}
        return zlib.compress(json.dumps(content).encode())

    def length(self, other: int) -> int:
        """The number of launched collectives with replica ``other``."""
        return self.forgotten[other] + sum(
            times * len(program.shared(self.ordinal, other)) for program, times in self.runs
        )

    def pieces(self, other: int) -> Iterator[tuple[int, Collectives, int]]:
        """For each run with collectives with ``other``: its start, its program, and its repetitions."""
        start = self.forgotten[other]
        for program, times in self.runs:
            items = program.shared(self.ordinal, other)
            if items:
                yield start, program, times
                start += times * len(items)


class Difference(RuntimeError):
    """Two replicas launched different collectives; the message shows both sides."""


def first_difference(a: Log, b: Log, start: int) -> tuple[int, str | None, str | None]:
    """The first position at or after ``start`` where two logs differ, and the collective there in each.

    If one log ends first, the position is its length, and both collectives are None.
    """
    left, right = (
        [(start, program.shared(a.ordinal, b.ordinal), times) for start, program, times in pieces]
        for pieces in (a.pieces(b.ordinal), b.pieces(a.ordinal))
    )
    i = j = 0
    position = max(start, left[0][0] if left else start, right[0][0] if right else start)
    for _ in range(_MOST_COMPARED):
        while i < len(left) and position >= left[i][0] + len(left[i][1]) * left[i][2]:
            i += 1
        while j < len(right) and position >= right[j][0] + len(right[j][1]) * right[j][2]:
            j += 1
        if i == len(left) or j == len(right):
            break
        (from_a, items_a, times_a), (from_b, items_b, times_b) = left[i], right[j]
        at_a, at_b = (position - from_a) % len(items_a), (position - from_b) % len(items_b)
        if items_a == items_b and at_a == at_b:
            position = min(from_a + times_a * len(items_a), from_b + times_b * len(items_b))
        elif items_a[at_a] != items_b[at_b]:
            return position, items_a[at_a], items_b[at_b]
        else:
            position += 1
    return position, None, None


def _at(log: Log, other: int, position: int) -> tuple[Collectives, int] | None:
    """The program with the collective at this position of a log, and its index among those with ``other``."""
    for start, program, times in log.pieces(other):
        count = len(program.shared(log.ordinal, other))
        if start <= position < start + count * times:
            return program, (position - start) % count
    return None


def _item_at(log: Log, other: int, position: int) -> str | None:
    place = _at(log, other, position)
    return place[0].shared(log.ordinal, other)[place[1]] if place is not None else None


def _line_at(log: Log, other: int, position: int) -> str:
    """The line of the log's replica that recorded a collective; empty if unknown."""
    place = _at(log, other, position)
    if place is None:
        return ""
    program, index = place
    lines = jobs.lookup(f"{PLACES_FOLDER}/{log.ordinal}/{program.digest}")
    if lines is not None:
        program = Collectives(program.items, json.loads(lines))
    return program.place(log.ordinal, other, index)


class OrderCheck:
    """This process's log, and what it knows of the logs of other processes."""

    def __init__(self, ordinal: int, world: int) -> None:
        self.log = Log(ordinal)
        self.launched = 0
        """How many collectives this process has launched."""
        self.world = world
        self.programs: dict[str, Collectives] = {}
        self.foreign: dict[str, Collectives] = {}
        self.followed: set[tuple[str, str]] = set()
        self.compared: collections.Counter[int] = collections.Counter()
        self.others: dict[int, Log] = {}
        self.launch_log: LaunchLog | None = None
        self.on_unusual: Callable[[], None] = lambda: None
        """Called after a launch that the other processes must see."""
        self._lock = threading.RLock()
        self._shown: bytes | None = None

    def launch(self, program: Collectives) -> bool:
        """Log one launch; returns whether the other processes must see it immediately.

        That is the case for the program's first launch, and for its first launch after the previous program,
        because another replica may take a different branch there.
        """
        with self._lock:
            if program.digest not in self.programs:
                # before the launch log names it, which other processes read immediately
                jobs.publish(f"{PROGRAM_FOLDER}/{program.digest}", program.encode())
                lines = json.dumps(program.places).encode()
                jobs.publish(f"{PLACES_FOLDER}/{self.log.ordinal}/{program.digest}", lines)
            known = self.programs.setdefault(program.digest, program)
            before = self.log.runs[-1][0].digest if self.log.runs else ""
            unusual = (before, known.digest) not in self.followed
            self.followed.add((before, known.digest))
            self._note(self.log.append(known), known.digest)
            flight_ring.note(flight_ring.COLLECTIVE, program, self.launched)
            self.launched += len(program.items)
        if unusual:
            self.show()
            self.on_unusual()
        return unusual

    def _note(self, times: int, digest: str) -> None:
        if self.launch_log is None:
            return
        if times == 1:
            self.launch_log.begin(self.log.ordinal, self.log.latest, digest)
        else:
            self.launch_log.repeat(self.log.ordinal, self.log.latest, times)

    def show(self) -> None:
        """Publish the log if it has changed."""
        with self._lock:
            encoded = self.log.encode()
            if encoded == self._shown:
                return
            self._shown = encoded
        jobs.publish(f"{LOG_FOLDER}/{self.log.ordinal}", encoded)

    def compare(self) -> None:
        """Compare this log with those of the other processes. Raises Difference."""
        for name, data in jobs.published(LOG_FOLDER).items():
            ordinal = int(name)
            if ordinal != self.log.ordinal:
                self._compare(self._read(ordinal, data))

    def behind(self, program: Collectives) -> list[int]:
        """Replicas that take part in ``program``, the latest launch, but have not launched it yet."""
        with self._lock:
            me = self.log.ordinal
            waiting = []
            for other in range(self.world):
                shared = len(program.shared(me, other)) if other != me else 0
                if shared:
                    reached = self.others[other].length(me) if other in self.others else 0
                    if reached <= self.log.length(other) - shared:
                        waiting.append(other)
            return waiting

    def length(self, other: int) -> int:
        """The number of collectives with replica ``other`` that this replica has launched."""
        with self._lock:
            return self.log.length(other)

    def seen(self) -> dict[int, int]:
        """The numbers of collectives with this replica that the others are known to have launched, by ordinal."""
        with self._lock:
            return {n: log.length(self.log.ordinal) for n, log in self.others.items()}

    def ahead_of(self) -> dict[int, tuple[int, int]]:
        """Replicas that have launched fewer common collectives than this one, with both counts."""
        with self._lock:
            me = self.log.ordinal
            counts = {
                other: (self.log.length(other), self.others[other].length(me))
                for other in range(self.world)
                if other in self.others
            }
            return {other: pair for other, pair in counts.items() if pair[0] > pair[1]}

    def _read(self, ordinal: int, data: bytes) -> Log:
        content = json.loads(zlib.decompress(data))
        log = Log(ordinal)
        log.first = content["first"]
        log.forgotten.update({int(k): v for k, v in content["forgotten"].items()})
        log.runs.extend((self._program(digest), times) for digest, times in content["runs"])
        start = max(log.latest, 0)
        for run, digest, times in self.launch_log.since(ordinal, start) if self.launch_log else ():
            if run == log.latest:
                log.runs.pop()
            log.runs.append((self._program(digest), times))
        self.others[ordinal] = log
        return log

    def _program(self, digest: str) -> Collectives:
        program = self.programs.get(digest) or self.foreign.get(digest)
        if program is None:
            for name, data in jobs.published(PROGRAM_FOLDER).items():
                self.foreign.setdefault(name, Collectives.decode(data))
            program = self.foreign[digest]
        return program

    def last(self) -> str:
        """The latest launched collective, for reports."""
        with self._lock:
            return self.log.runs[-1][0].items[-1][0] if self.log.runs else "no collective so far"

    def _compare(self, other: Log) -> None:
        with self._lock:
            mine, theirs = self.log.ordinal, other.ordinal
            start = self.compared[theirs]
            position, left, right = first_difference(self.log, other, start)
            self.compared[theirs] = max(start, position)
            if left is None or right is None:
                return
            sides = []
            for log, item, partner in ((self.log, left, theirs), (other, right, mine)):
                former = _item_at(log, partner, position - 1)
                before = f", after {former}" if former else ", its first"
                line = _line_at(log, partner, position)
                at = f" at {line}" if line else ""
                sides.append(_SIDE.format(ordinal=log.ordinal, item=item, at=at, before=before))
        first, second = sides if mine < theirs else reversed(sides)
        raise Difference(
            MSG_DIFFERENT.format(position=position + 1, first=first, second=second)
        )  # fmt: skip


def describe(name: str, arguments: Sequence[object], groups: Groups, world: int) -> str:
    """A collective as reports show it: ``all_reduce sum of float32[3, 4] over all 2 replicas``."""
    words = " ".join(str(a) for a in arguments)
    over = f"all {world} replicas" if len(groups) == 1 else f"groups {[list(g) for g in groups]}"
    return f"{name} {words} over {over}"
