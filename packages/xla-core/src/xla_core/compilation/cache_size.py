"""Limits the size of a persistent cache: when it is too large, the least recently used entries are removed.

Several processes share a directory, and none knows what the others write. Each counts what it has written, and
checks the directory when this may have made it too large. A lock ensures that only one process does so at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from xla_core.support import counters

LOCK: Final = ".pruning"
_LOW: Final = 0.9
"""How full the directory is after pruning, so that the next program does not trigger it again."""
_SHARE: Final = 16
"""A process checks the directory when it has written 1/_SHARE of the limit."""


class SizeBound:
    """Keeps the files that end with ``suffix`` in ``folder`` below ``limit`` bytes together."""

    def __init__(self, folder: Path, suffix: str, limit: int) -> None:
        self._folder = folder
        self._suffix = suffix
        self._limit = limit
        self._unseen = limit  # so that the first write checks the directory

    def takes(self, size: int) -> bool:
        """Whether a file of ``size`` bytes fits at all."""
        return size <= self._limit * _LOW

    def wrote(self, size: int) -> None:
        """Count a file that was written, and remove old files if necessary. Raises OSError."""
        self._unseen += size
        if self._unseen * _SHARE >= self._limit:
            self._prune()

    def _prune(self) -> None:
        with (self._folder / LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process is pruning
                return
            self._unseen = 0
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            if total <= self._limit:
                return
            for _, size, name in files:
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / name).unlink()
                    counters.increment("PersistentCachePruned")
                total -= size
                if total <= self._limit * _LOW:
                    return

    def _files(self) -> list[tuple[float, int, str]]:
        """The time of last use, the size and the name of each entry."""
        files = []
        with os.scandir(self._folder) as listed:
            for entry in listed:
                if entry.name.endswith(self._suffix):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        used = max(status.st_atime, status.st_mtime)
                        files.append((used, status.st_size, entry.name))
        return files


def used(path: Path) -> None:
    """Set a file's time of last use to now, in case the file system does not (``noatime``)."""
    with contextlib.suppress(OSError):
        os.utime(path, (time.time(), path.stat().st_mtime))
