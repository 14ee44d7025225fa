"""Collectives that wait for ever: the watchdog finds them, as no exception reaches the main thread.

A replica that launched a collective which another has not launched is ahead of it. That is nothing
bad by itself, since running is asynchronous. It is the end when the other has finished, or waits
somewhere else for this one, which waits for its device; or when it lasts too long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Final

from xla_dist.agreement import Agreement

CROSSED_SECONDS: Final = 4.0

_DEVICE_MODULES: Final = (
    "xla_core._jax_compat",
    "xla_core.pjrt.client",
    "xla_core.pjrt.executable",
)

MSG_FINISHED: Final = (
    "ordinal {me} waits in {what}, which ordinal {other} never reaches: it has finished. Every "
    "replica has to call the same collectives"
)
MSG_CROSSED: Final = (
    "ordinal {me} waits in {what} for ordinal {other}, which waits at {doing} for the others: neither "
    "will come. Every replica has to make the same calls in the same order"
)
MSG_LATE: Final = (
    "ordinal {me} waits in {what}, which ordinal {other} has not reached for {seconds:.0f} s "
    "(XLA_DIST_WAIT_TIMEOUT)"
)


def waits_for_device() -> bool:
    """Whether the main thread is inside the runtime at this moment, waiting for a value."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__") in _DEVICE_MODULES


class Stalls:
    """Looks at one agreement again and again; remembers since when nothing has moved."""

    def __init__(self, agreement: Agreement, timeout: float) -> None:
        self.agreement = agreement
        self.timeout = timeout
        self._seen: object = None
        self._since = 0.0

    def look(self, finished: set[int], waiting: Mapping[int, str]) -> str | None:
        """What is the matter, or None. ``waiting``: where other main threads wait, by ordinal."""
        now = time.monotonic()
        ahead = self.agreement.ahead_of()
        if not ahead or ahead != self._seen or not waits_for_device():
            self._seen, self._since = ahead, now
            return None
        other, facts = next(iter(ahead)), {"what": self.agreement.last()}
        facts |= {"me": str(self.agreement.log.ordinal), "other": str(other)}
        waited = now - self._since
        if other in finished:
            return MSG_FINISHED.format(**facts)
        if other in waiting and waited > CROSSED_SECONDS:
            return MSG_CROSSED.format(doing=waiting[other], **facts)
        return MSG_LATE.format(seconds=waited, **facts) if waited > self.timeout else None
