"""Finds collectives that would wait for ever; used by the watchdog, as no exception reaches the main thread.

A replica that has launched a collective which another one has not launched is ahead of it. This is
normal, because runs are asynchronous. But the job cannot continue if the other replica has finished, or if it waits
elsewhere for this one, which waits for its device; and it must not last too long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from xla_core.extension_api import runtime
from xla_dist.job_health import peer_queries
from xla_dist.job_health.collective_order import OrderCheck
from xla_dist.settings import WAIT_TIMEOUT, WARN_AFTER

CROSSED_SECONDS: Final = 4.0
ASK_SECONDS: Final = 0.5
"""After this time an awaited replica is asked where it is, and begins to watch its own threads."""


MSG_FINISHED: Final = (
    "ordinal {me} waits in {what}, which ordinal {other} never reaches: it has finished. Every "
    "replica has to call the same collectives"
)
MSG_CROSSED: Final = (
    "ordinal {me} waits in {what} for ordinal {other}, which waits at {doing} for the others: neither "
    "will come. Every replica has to make the same calls in the same order"
)
MSG_SLOW: Final = (
    "ordinal {me} waits in {what}, which ordinal {other} has not reached for {seconds:.0f} s"
)
MSG_LATE: Final = f"{MSG_SLOW} (XLA_DIST_WAIT_TIMEOUT)"


def waits_for_device() -> bool:
    """Whether a thread other than this one is inside the runtime now."""
    me = threading.get_ident()
    return any(
        frame.f_globals.get("__name__") in runtime.DEVICE_CODE
        for thread, frame in sys._current_frames().items()
        if thread != me
    )


class StallDetector:
    """Checks the order of collectives repeatedly, and remembers since when nothing has changed.

    ``on_slow`` is told, once, what waits for a replica that is only slow so far, and for how many seconds.
    """

    def __init__(self, order_check: OrderCheck, on_slow: Callable[[str, float], None]) -> None:
        self.order_check = order_check
        self._on_slow = on_slow
        self._seen: object = None
        self._since = 0.0
        self._warned = False
        self._questions = peer_queries.Questions(order_check.log.ordinal)

    def look(self, finished: set[int], waiting: Mapping[int, str]) -> str | None:
        """The message about a collective that waits for ever, or None; warns about a replica that is only slow.

        ``finished`` has the replicas that have finished, ``waiting`` the places where others wait for this one, by
        ordinal. Both must have been read before ``order_check`` read the other logs, which contain what came later.
        """
        now = time.monotonic()
        ahead = self.order_check.ahead_of()
        if not ahead or ahead != self._seen or not waits_for_device():
            self._seen, self._since, self._warned = ahead, now, False
            self._questions.close()
            return None
        waited = now - self._since
        for other in sorted(ahead, key=lambda r: (r not in finished, r not in waiting, r)):
            return self._judge(other, waited, other in finished, waiting.get(other))
        return None

    def _judge(self, other: int, waited: float, finished: bool, doing: str | None) -> str | None:
        facts = {
            "me": self.order_check.log.ordinal,
            "what": self.order_check.last(),
            "other": other,
        }
        if waited > ASK_SECONDS:
            self._questions.ask(other, self.order_check.last())
        if finished:
            return MSG_FINISHED.format(**facts)
        if doing is not None and waited > CROSSED_SECONDS:
            return MSG_CROSSED.format(doing=doing, **facts)
        if waited > WAIT_TIMEOUT.get():
            return MSG_LATE.format(seconds=waited, **facts) + peer_queries.stack(other)
        if waited > WARN_AFTER.get() and not self._warned:
            self._warned = True
            text = MSG_SLOW.format(seconds=waited, **facts)
            self._on_slow(text + peer_queries.where(other), waited)
        return None
