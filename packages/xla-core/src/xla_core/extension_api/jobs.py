"""The job that this process is part of: its place in it, and a small store that all processes see."""

from __future__ import annotations

from xla_core.contract.job import Job
from xla_core.multiprocess.job_setup import (
    COORDINATOR_VARIABLE,
    COUNT_VARIABLE,
    INDEX_VARIABLE,
    LOCAL_COUNT_VARIABLE,
    LOCAL_INDEX_VARIABLE,
    SERVED_VARIABLE,
    Connection,
    connect,
    connection,
    disconnect,
    increment,
    lookup,
    publish,
    published,
    serve,
    serve_apart,
    withdraw,
)
from xla_core.multiprocess.startup_watchdog import EXIT_CODE

__all__ = [
    "COORDINATOR_VARIABLE",
    "COUNT_VARIABLE",
    "Connection",
    "EXIT_CODE",
    "INDEX_VARIABLE",
    "Job",
    "LOCAL_COUNT_VARIABLE",
    "LOCAL_INDEX_VARIABLE",
    "SERVED_VARIABLE",
    "connect",
    "connection",
    "disconnect",
    "increment",
    "lookup",
    "publish",
    "published",
    "serve",
    "serve_apart",
    "withdraw",
]
