"""What this process says of itself in a flight report: ``xla_core.support.flight_report`` has the fields."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from typing import Final, Protocol

from xla_core.contract.foreign_values import JsonObject
from xla_core.extension_api.distributed import recorded_calls
from xla_core.support import flight_ring
from xla_dist.job_health import thread_states
from xla_dist.job_health.collective_order import Collectives, OrderCheck

RECORDS: Final = 256
COLLECTIVES: Final = 64
"""This number of the last ones goes into a snapshot ..."""
FEW_RECORDS: Final = 16
FEW_COLLECTIVES: Final = 16
"""... and into a brief one."""
_INSIDE: Final = (
    flight_ring.LAUNCH, flight_ring.COMPILE, flight_ring.SEND, flight_ring.FETCH, flight_ring.WAIT,
)  # fmt: skip
_REASON: Final = 4000
"""Characters of a failure's text that are kept, from its end."""


class WaitingCall(Protocol):
    """The call in which the main thread waits: a ``failure_reports.Waiting``."""

    what: str
    missing: tuple[int, ...]
    since: float


class Facts:
    """What the caller knows of this process: ``waiting`` is a ``failure_reports.Waiting`` or None.

    ``snapshot`` is what ``take`` returned, if that was before the report is written.
    """

    def __init__(
        self, reason: str = "", waiting: WaitingCall | None = None, finished: bool = False
    ) -> None:
        self.reason = reason
        self.waiting = waiting
        self.finished = finished
        self.error: str | None = None
        self.broke: str | None = None
        self.place: str | None = None
        self.stack = ""
        self.snapshot: JsonObject | None = None

    def raised(self, error: BaseException, own: bool) -> None:
        """This process ends by an error: its ``own``, or that of a collective that another one broke."""
        text = f"{type(error).__name__}: {error}"[:_REASON]
        self.error, self.broke = (text, None) if own else (None, text)
        self.place = thread_states.place_of_error(error.__traceback__)
        self.stack = "".join(traceback.format_tb(error.__traceback__))


def take(order_check: OrderCheck | None, ordinal: int, count: int, facts: Facts) -> JsonObject:
    """All that a report has of this process, as one ``json`` object."""
    condition = thread_states.ThreadWatch().look()
    snapshot = _brief(order_check, ordinal, count, facts, RECORDS, COLLECTIVES)
    snapshot["place"] = facts.place or condition.place
    snapshot["doing"] = condition.doing
    snapshot["stack"] = facts.stack or condition.stack
    snapshot["calls"] = recorded_calls(COLLECTIVES)
    return snapshot


def take_brief(
    order_check: OrderCheck | None, ordinal: int, count: int, facts: Facts
) -> dict[str, object]:
    """The same without stack, and with few records: what the others keep of this process."""
    snapshot = _brief(order_check, ordinal, count, facts, FEW_RECORDS, FEW_COLLECTIVES)
    snapshot["place"] = facts.place or thread_states.main_place()
    return snapshot


def _brief(
    order_check: OrderCheck | None, ordinal: int, count: int, facts: Facts, records: int, items: int
) -> dict[str, object]:
    ring = flight_ring.records()
    times = flight_ring.step_times()
    return {
        "ordinal": ordinal,
        "count": count,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "reason": facts.reason[-_REASON:],
        "error": facts.error,
        "broke": facts.broke,
        "finished": facts.finished,
        "place": "",
        "doing": "",
        "stack": "",
        "waiting": _waiting(facts.waiting),
        "inside": _inside(ring),
        "meets": _under_way(ring, flight_ring.MEET),
        "writes": _under_way(ring, flight_ring.WRITE),
        "launched": _launched(order_check, ordinal, count),
        "seen": {str(n): c for n, c in order_check.seen().items()}
        if order_check is not None
        else {},
        "collectives": _collectives(ring, items),
        "calls": [],
        "programs": flight_ring.programs(ring[-records:]),
        "steps": times._asdict(),
        "records": _rendered(ring[-records:]),
    }


def _waiting(waiting: WaitingCall | None) -> dict[str, object] | None:
    if waiting is None:
        return None
    seconds = time.monotonic() - waiting.since
    return {"what": waiting.what, "missing": list(waiting.missing), "seconds": seconds}


def _inside(ring: list[flight_ring.Record]) -> dict[str, object] | None:
    """What the main thread has begun in the runtime and not ended."""
    main = threading.main_thread().ident
    for record in reversed(ring):
        kind, began, took, thread, what, amount = record
        if thread != main:
            continue
        if kind == flight_ring.STEP:
            return None  # what began before has been broken off
        if kind in _INSIDE and took == flight_ring.RUNNING:
            seconds = time.time() - flight_ring.wall_clock(began)
            return {"kind": kind, "what": _what(what), "amount": amount, "seconds": seconds}
    return None


def _under_way(ring: list[flight_ring.Record], kind: str) -> list[dict[str, object]]:
    """Records of a kind that have not ended, of any thread."""
    return [
        {"what": _what(what), "seconds": time.time() - flight_ring.wall_clock(began)}
        for one, began, took, _, what, _ in ring
        if one == kind and took == flight_ring.RUNNING
    ]


def _launched(order_check: OrderCheck | None, ordinal: int, count: int) -> dict[str, object]:
    if order_check is None:
        return {"all": 0, "with": {}}
    counts = {n: order_check.length(n) for n in range(count) if n != ordinal}
    return {"all": order_check.launched, "with": {str(n): c for n, c in counts.items() if c}}


def _collectives(ring: list[flight_ring.Record], most: int) -> list[dict[str, object]]:
    """The last collectives launched, the oldest first."""
    newest_first: list[dict[str, object]] = []
    for record in reversed(ring):
        if record[0] != flight_ring.COLLECTIVE:
            continue
        program: Collectives = record[4]
        moment = flight_ring.wall_clock(record[1])
        rows = list(zip(program.items, program.places, strict=True))
        for index in reversed(range(len(rows))):
            (text, groups), place = rows[index]
            number = record[5] + index + 1
            one = {"number": number, "text": text, "groups": groups, "line": place, "time": moment}
            newest_first.append(one)
            if len(newest_first) == most:
                return newest_first[::-1]
    return newest_first[::-1]


def _rendered(ring: list[flight_ring.Record]) -> list[list[object]]:
    names = {t.ident: t.name for t in threading.enumerate()}
    now = flight_ring.wall_clock(0)
    return [
        [
            kind, now + began / 1e9, None if took == flight_ring.RUNNING else took / 1e9,
            names.get(thread, str(thread)), _what(what),
            0 if kind == flight_ring.COLLECTIVE else amount,
        ]
        for kind, began, took, thread, what, amount in ring
    ]  # fmt: skip


def _what(what: object) -> str:
    """What a record is about, as text."""
    if what is None:
        return ""
    if isinstance(what, Collectives):
        more = len(what.items) - 1
        return what.items[0][0] + (f" and {more} more" if more else "")
    if isinstance(what, tuple):
        dtype, shape = what
        return f"{dtype}{list(shape)}"
    return str(what)
