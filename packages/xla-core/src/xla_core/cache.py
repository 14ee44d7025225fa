"""The persistent compilation cache of this process: chosen in code or by the environment."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from xla_core import flags
from xla_core.persistent_cache import CacheKey, PersistentCache

logger = logging.getLogger(__name__)

PATH: Final = flags.Flag(
    "XLA_PERSISTENT_CACHE_PATH", str, "", "directory that keeps compiled programs; empty: none is kept"
)
READ_ONLY: Final = flags.Flag(
    "XLA_PERSISTENT_CACHE_READ_ONLY", flags.parse_bool, False, "the cache of the environment is not written to"
)


class _State:
    cache: PersistentCache | None = None
    decided = False


_lock = threading.Lock()


def initialize(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Use the directory ``path`` from now on. Raises CacheRefusedError if others can write to it."""
    with _lock:
        _State.cache = PersistentCache(path, readonly=readonly)
        _State.decided = True


def current() -> PersistentCache | None:
    """The cache in use; at the first call the environment may name one."""
    if not _State.decided:
        with _lock:
            if not _State.decided:
                path = PATH.get()
                _State.cache = PersistentCache(path, readonly=READ_ONLY.get()) if path else None
                _State.decided = True
    return _State.cache


def unusable(key: CacheKey, error: Exception) -> None:
    """Say that an intact entry could not be loaded by the device; it is compiled again."""
    logger.warning("the persistent cache entry %s does not load (%s); compiling again", key.file_name, error)
