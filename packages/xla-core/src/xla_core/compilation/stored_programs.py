"""Executables in the persistent cache: loading one by its key, and storing one."""

from __future__ import annotations

import contextlib

from xla_core.compilation import disk_cache, staged_executable, warm_start
from xla_core.compilation.disk_cache import CacheKey
from xla_core.contract.device_protocol import DeviceClient, Executable, Placement


def load(
    client: DeviceClient, key: CacheKey | None, name: str, placement: Placement
) -> Executable | None:
    """The executable stored under ``key``, loaded for ``client`` and ``placement``; None if there is none.

    ``name`` is the program's name. A program that was loaded ahead is used; one that cannot be loaded causes a
    warning, and counts as not stored.
    """
    stored = disk_cache.current()
    if stored is None or key is None:
        return None
    warm_start.note(key, placement)
    prefetched = warm_start.take(key)
    payload = stored.get(key) if prefetched is None else None
    if payload is None:
        return prefetched
    try:
        return staged_executable.deserialize(client, payload, name, placement)
    except (ValueError, RuntimeError) as error:
        disk_cache.warn_unusable(key, error)
        return None


def store(key: CacheKey | None, executable: Executable) -> None:
    """Store an executable under ``key``, if a cache is in use and the plugin can serialize."""
    stored = disk_cache.current()
    if stored is None or key is None or stored.readonly:
        return
    with contextlib.suppress(NotImplementedError):
        stored.put(key, executable.serialize())
