"""The size of a persistent cache: when it is too large, what was not used for longest is removed.

Several processes share a directory, and none knows what the others write. Each counts what it wrote itself, and
looks at the directory when that may have made it too large; one at a time, which holds a lock.
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
"""How full it is afterwards: not to begin again with the next program."""
_SHARE: Final = 16
"""The directory is looked at when a process has written this fraction of the bound."""


class SizeBound:
    """Keeps the files that end with ``suffix`` in ``folder`` below ``limit`` bytes together."""

    def __init__(self, folder: Path, suffix: str, limit: int) -> None:
        self._folder = folder
        self._suffix = suffix
        self._limit = limit
        self._unseen = limit  # at the first time nothing is known

    def takes(self, size: int) -> bool:
        """Whether one file of ``size`` bytes is not too large by itself."""
        return size <= self._limit * _LOW

    def wrote(self, size: int) -> None:
        """Count a file that was written, and remove others if they have become too many. Raises OSError."""
        self._unseen += size
        if self._unseen * _SHARE >= self._limit:
            self._prune()

    def _prune(self) -> None:
        with (self._folder / LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process is at it
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
        """When each was last used, its size and its name."""
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
    """Remember that a file is used now, also where the file system does not by itself (``noatime``)."""
    with contextlib.suppress(OSError):
        os.utime(path, (time.time(), path.stat().st_mtime))
