"""torch.distributed's key-value store on top of the job's coordinator, so that it needs no port of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed

from xla_core.extension_api import jobs, runtime
from xla_dist.job_health import failure_reports
from xla_dist.processes import session

_FOLDER: Final = "torch"
_PAUSE: Final = 0.002
# torch's PrefixStore holds a reference to the C++ object of a store only, whose calls reach the methods of
# CoordinatorStore through the Python object: this list keeps the Python objects alive.
_stores: Final[list[torch.distributed.Store]] = []

_CHECK_SECONDS: Final = 1.0

MSG_TIMEOUT: Final = "xla:// waited {seconds:.0f} s for the keys {missing}"
MSG_FINISHED: Final = (
    "ordinal {me} waits for the keys {missing} of torch.distributed, which will never be set: all "
    "other processes have finished"
)


class CoordinatorStore(torch.distributed.Store):
    """A store whose keys all processes of the job share, under ``torch/`` in the coordinator's store.

    ``timeout`` is how long ``get`` waits, and ``wait`` by default.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value``, bytes or text, under ``key``."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        jobs.publish(self._path(key), b"=" + data)

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until there is one. Raises DistStoreError like ``wait``."""
        self.wait([key], self.timeout)
        return self._lookup(key) or b""

    def add(self, key: str, value: int) -> int:
        """Add ``value`` to the counter ``key``, which starts at 0; returns its new value."""
        return jobs.increment(self._path(key, "#"), value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._lookup(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises DistStoreError after ``timeout`` (default: that of the store), or when all other processes have
        finished.
        """
        seconds = (timeout or self.timeout).total_seconds()
        began = checked = time.monotonic()
        missing, alone = list(keys), False
        while missing := [key for key in missing if self._lookup(key) is None]:
            now = time.monotonic()
            if alone or now - began > seconds:
                me = session.current().ordinal
                text = MSG_FINISHED if alone else MSG_TIMEOUT
                facts = {"seconds": seconds, "missing": missing, "me": me}
                raise torch.distributed.DistStoreError(text.format(**facts))
            if now - checked > _CHECK_SECONDS:
                # the loop then checks the keys once more: the last process may have set one before it finished
                checked, alone = now, _others_finished()
            time.sleep(_PAUSE)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; returns whether it had a value."""
        existed = self._lookup(key) is not None
        jobs.withdraw(self._path(key))
        jobs.withdraw(self._path(key, "#"))
        return existed

    def num_keys(self) -> int:
        """The number of keys that all processes have set."""
        return len(jobs.published(_FOLDER))

    def _path(self, key: str, kind: str = "=") -> str:
        # the coordinator treats a slash as a folder
        return f"{_FOLDER}/{kind}{key.replace('/', '|')}"

    def _lookup(self, key: str) -> bytes | None:
        data = jobs.lookup(self._path(key))
        if data is not None:
            return data[1:]
        return jobs.lookup(self._path(key, "#"))


def _others_finished() -> bool:
    current = session.current()
    return len(failure_reports.finished() - {current.ordinal}) == current.world - 1


def join(_url: str, timeout: timedelta | None) -> tuple[torch.distributed.Store, int, int]:
    """The store, the rank and the world size for ``init_method='xla://'``.

    ``timeout`` is the store's (default: torch's). Starts the device client. A process without a job gets a
    store in memory.
    """
    runtime.client()
    ordinal, world = runtime.replica_of()
    if jobs.connection() is None:
        return torch.distributed.HashStore(), ordinal, world
    session.current()
    store = CoordinatorStore(timeout or torch.distributed.default_pg_timeout)
    _stores.append(store)
    return store, ordinal, world
