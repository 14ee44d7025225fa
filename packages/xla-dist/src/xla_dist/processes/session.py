"""This process's part in the job while it runs: what it agrees on with the others, its watchdog."""

from __future__ import annotations

import threading
from typing import Final

from xla_core.extension_api import jobs
from xla_dist.job_health import failure_reports
from xla_dist.job_health.collective_order import Agreement

MSG_ALONE: Final = "this process is not part of a job of several processes"


class Session:
    """One process among ``world``; its ordinal is the number of its process."""

    def __init__(self, connection: jobs.Connection) -> None:
        self.connection = connection
        self.ordinal = connection.job.index
        self.world = connection.job.count
        self.agreement = Agreement(self.ordinal, self.world)
        self.watchdog = failure_reports.watch(self.agreement)


_lock: Final = threading.Lock()
_sessions: Final[list[Session]] = []


def begin() -> Session | None:
    """Start looking after the others once the processes have met; None when this one is alone."""
    connection = jobs.connection()
    if connection is None:
        return None
    with _lock:
        if not _sessions:
            _sessions.append(Session(connection))
        return _sessions[0]


def current() -> Session:
    """The running session. Raises RuntimeError for a process that is alone."""
    session = _sessions[0] if _sessions else begin()
    if session is None:
        raise RuntimeError(MSG_ALONE)
    return session
