"""``Session``: this process's place in the running job, its log of collectives, and its watchdog."""

from __future__ import annotations

import threading
from typing import Final

from xla_core.extension_api import jobs
from xla_dist.job_health import failure_reports
from xla_dist.job_health.collective_order import OrderCheck

MSG_ALONE: Final = "this process is not part of a job of several processes"


class Session:
    """This process's part in a job of ``world`` processes; ``ordinal`` is the number of this process.

    ``order_check`` compares the collectives of this process with those of the others; ``watchdog`` runs it, and
    looks for processes that fail (None if no watchdog runs).
    """

    def __init__(self, connection: jobs.Connection) -> None:
        self.connection = connection
        self.ordinal = connection.job.index
        self.world = connection.job.count
        self.order_check = OrderCheck(self.ordinal, self.world)
        self.watchdog = failure_reports.watch(self.order_check)


_lock: Final = threading.Lock()
_sessions: Final[list[Session]] = []


def begin() -> Session | None:
    """The session of this process; starts it, and its watchdog, in the first call. None without a job."""
    connection = jobs.connection()
    if connection is None:
        return None
    with _lock:
        if not _sessions:
            _sessions.append(Session(connection))
        return _sessions[0]


def current() -> Session:
    """The session of this process. Raises RuntimeError if the process is not part of a job."""
    session = _sessions[0] if _sessions else begin()
    if session is None:
        raise RuntimeError(MSG_ALONE)
    return session
