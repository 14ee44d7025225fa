"""Waiting for other replicas without hanging: growing pauses, a warning, and a time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final

from xla_core.support import flight_ring
from xla_dist.job_health import failure_reports, flight_recorder, peer_queries
from xla_dist.job_health.stall_detector import ASK_SECONDS, CROSSED_SECONDS
from xla_dist.settings import WAIT_TIMEOUT, WARN_AFTER

MSG_NOT_THERE: Final = "{what}: ordinal {waiting} has not arrived for {seconds:.0f} s"
MSG_GAVE_UP: Final = "{text} (XLA_DIST_WAIT_TIMEOUT)"
MSG_FINISHED: Final = (
    "{what}: ordinal {waiting} never arrives: it has finished. Every replica has to make the same "
    "calls"
)
MSG_CROSSED: Final = (
    "ordinal {me} waits at {what} {others} for ordinal {me}: all wait for ever. Every replica has to "
    "make the same calls in the same order"
)
_NEXT: Final = "for ordinal {ordinal}, which waits at {what}"

# What ``__exit__`` takes.
_Raised = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


def circle(me: int, waiting: Mapping[int, failure_reports.Waiting]) -> list[int]:
    """Replicas each of which waits for the next, and the last for the first, which is ``me``.

    Empty if there is no such circle, or if all are at the same place, where they are about to meet.
    """
    paths, seen = [[me]], {me}
    for path in paths:  # grows meanwhile
        for other in waiting[path[-1]].missing if path[-1] in waiting else ():
            if other == me and len({waiting[r].what for r in path}) > 1:
                return path
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return []


class BoundedWait:
    """A wait for other replicas that warns, ends in time, and notices replicas that never arrive.

    ``ordinal`` is this replica. With ``endless`` (default: False), the wait has no time limit, because the others
    may still be training.
    """

    def __init__(self, what: str, ordinal: int, endless: bool = False) -> None:
        self.what = what
        self.ordinal = ordinal
        self.endless = endless
        self.started = self.checked = time.monotonic()
        self.warned = False
        self.pause = 0.0005
        self._context = failure_reports.waiting(what)
        self._state: failure_reports.Waiting | None = None
        self._record: list[object] = []
        self._questions = peer_queries.Questions(ordinal)

    def __enter__(self) -> BoundedWait:
        self._record = flight_ring.begin(flight_ring.MEET, self.what)
        self._state = self._context.__enter__()
        return self

    def __exit__(self, *details: *_Raised) -> None:
        self._context.__exit__(*details)
        flight_ring.waited(self._record)
        with contextlib.suppress(
            RuntimeError
        ):  # the coordinator is gone, which is reported elsewhere
            self._questions.close()

    def wait(self, missing: Sequence[int]) -> None:
        """Pause once while waiting for the ``missing`` replicas.

        Raises RuntimeError if one of them has finished or waits elsewhere for this one, or if the
        time limit is over.
        """
        if self._state is not None and not self.endless:
            self._state.missing = tuple(missing)
        now = time.monotonic()
        if now - self.checked > ASK_SECONDS:
            self.checked = now
            self._questions.ask(missing[0], self.what)
            if not self.endless:
                self._check(missing, now - self.started)
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, 0.05)

    def _check(self, missing: Sequence[int], waited: float) -> None:
        gone = sorted(failure_reports.finished() & set(missing))
        if gone:
            raise RuntimeError(MSG_FINISHED.format(what=self.what, waiting=gone[0]))
        first = missing[0]
        waiting = failure_reports.everyone_waiting()
        met = circle(self.ordinal, waiting) if waited > CROSSED_SECONDS else []
        if met:
            others = " ".join(_NEXT.format(ordinal=r, what=waiting[r].what) for r in met[1:])
            facts = {"me": self.ordinal, "what": self.what, "others": others}
            raise RuntimeError(MSG_CROSSED.format(**facts))
        text = MSG_NOT_THERE.format(what=self.what, waiting=first, seconds=waited)
        if waited > WARN_AFTER.get() and not self.warned:
            self.warned = True
            flight_recorder.slow(text + peer_queries.where(first), waited)
        if waited > WAIT_TIMEOUT.get():
            raise RuntimeError(MSG_GAVE_UP.format(text=text) + peer_queries.stack(first))
