"""Loads the programs that the last run of a script used, while its model is still being built.

XLA takes tens of milliseconds to seconds to load a stored program, without holding the interpreter's
lock. The programs that a run loads and stores are listed in the cache directory under the script's name. The next
run loads the same programs in the same order in a thread of its own, as soon as the device
starts. A wrong prediction costs processor time but never gives a wrong program: programs are looked up by
their full key, and the prediction is abandoned at the first program that was not predicted.

If the device's client can ``rehearse``, loaded programs that are not in use yet are then run once on
artificial arguments, because the first run of a program may have to set things up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from xla_core.compilation import disk_cache, staged_executable
from xla_core.compilation.disk_cache import CacheKey, PersistentCache
from xla_core.contract.device_protocol import DeviceClient, Executable, Placement, capabilities_of
from xla_core.support import atomic_file, caches, counters, flags

logger = logging.getLogger(__name__)

FOLDER: Final = "runs"
"""The folder of the lists in the cache directory, one file per script."""
COUNTER: Final = "PersistentCachePrefetch"
"""The counter of programs that were loaded ahead and then used."""
REHEARSAL_COUNTER: Final = "PersistentCacheRehearsal"
"""The counter of programs (each stage counts) that were run on zeros ahead of their first use."""
# A script with more programs than this recompiles anyway; loading more could take all memory.
_MOST_PROGRAMS: Final = 32
_MOST_BYTES: Final = 512 << 20

Environment = Callable[[], tuple[tuple[str, bytes], ...]]
# of a program: its file, its name, the devices and the sharding of its placement
_Note = tuple[str, str, tuple[int, ...], str | None]


class Prefetch:
    """The programs that were predicted for one process, and the list of those that it has used.

    ``environment`` returns the entries of a cache key that are the same for all programs of this
    process; stored programs with other entries are not loaded.
    """

    def __init__(
        self, cache: PersistentCache, client: DeviceClient, environment: Environment
    ) -> None:
        self._cache = cache
        self._client = client
        self._environment = environment
        self._changed = threading.Condition()
        self._file = cache.path / FOLDER / f"{_script(client)}.json"
        self._predicted: list[_Note] = _read(self._file)[:_MOST_PROGRAMS]
        self._used: list[_Note] = []
        self._waiting = {file_name for file_name, *_ in self._predicted}
        self._loaded: dict[str, tuple[bytes, Executable]] = {}
        if self._predicted:
            threading.Thread(target=self._run, name="xla-prefetch").start()

    def take(self, key: CacheKey) -> Executable | None:
        """Remove and return the program of ``key``; waits if it is being loaded. None if it was not predicted."""
        with self._changed:
            if key.file_name not in self._waiting and key.file_name not in self._loaded:
                self._abandon()
                return None
            self._changed.wait_for(lambda: key.file_name not in self._waiting)
            stored, executable = self._loaded.pop(key.file_name, (b"", None))
        if executable is None or stored != key.encoded:
            return None
        counters.increment(COUNTER)
        return executable

    def note(self, key: CacheKey, placement: Placement) -> None:
        """List the program of ``key`` as used by this run, for the next one."""
        if len(self._used) == _MOST_PROGRAMS or self._cache.readonly:
            return
        self._used.append((key.file_name, key.program, placement.devices, placement.sharding))
        if self._predicted[: len(self._used)] != self._used:
            _write(self._file, self._used)

    def abandon(self) -> None:
        """Drop the programs that were loaded ahead and not used, and load no more."""
        with self._changed:
            self._abandon()

    def _abandon(self) -> None:
        self._waiting.clear()
        self._loaded.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        self._load_all()
        rehearse = capabilities_of(self._client).rehearse
        if rehearse is not None:
            self._rehearse_all(rehearse)

    def _load_all(self) -> None:
        size = 0
        for file_name, name, devices, sharding in self._predicted:
            with self._changed:
                if file_name not in self._waiting:
                    return  # abandoned
            loaded = None
            try:
                loaded, count = self._load(file_name, name, Placement(devices, sharding))
                size += count
            except (
                Exception
            ) as error:  # when the program is needed, it is loaded again, and errors are reported
                logger.debug("%s could not be loaded ahead: %s", file_name, error)
            with self._changed:
                if file_name in self._waiting:
                    self._waiting.discard(file_name)
                    if loaded is not None:
                        self._loaded[file_name] = loaded
                if size > _MOST_BYTES:
                    self._waiting.clear()
                self._changed.notify_all()

    def _rehearse_all(self, rehearse: Callable[[Executable], bool]) -> None:
        for file_name, *_ in self._predicted:
            executable = self._untaken(file_name)
            for part in staged_executable.parts(executable) if executable is not None else ():
                # at its exit, the interpreter waits for the current run, so begin no other
                if self._untaken(file_name) is None or not threading.main_thread().is_alive():
                    break
                try:
                    if rehearse(part):
                        counters.increment(REHEARSAL_COUNTER)
                except Exception as error:  # a relevant error occurs again in the real run
                    logger.debug("%s could not be rehearsed: %s", part.program_name, error)

    def _untaken(self, file_name: str) -> Executable | None:
        with self._changed:
            return self._loaded.get(file_name, (b"", None))[1]

    def _load(
        self, file_name: str, name: str, placement: Placement
    ) -> tuple[tuple[bytes, Executable] | None, int]:
        stored = self._cache.entry(file_name)
        if stored is None:
            return None, 0
        key, payload = stored
        if not set(self._environment()) <= set(key.entries):
            return None, 0
        executable = staged_executable.deserialize(self._client, payload, name, placement)
        return (key.encoded, executable), len(payload)


class _InUse:
    prefetch: Prefetch | None = None


def start(client: DeviceClient, environment: Environment) -> None:
    """Begin to load the programs of this script's last run, if a persistent cache is in use."""
    cache = disk_cache.current()
    wanted = flags.CACHE_PREFETCH.get() and not capabilities_of(client).shapes_only
    _InUse.prefetch = Prefetch(cache, client, environment) if cache is not None and wanted else None


def _forget() -> None:
    if _InUse.prefetch is not None:
        _InUse.prefetch.abandon()


caches.register(
    "programs loaded ahead", bound=1, size=lambda: int(_InUse.prefetch is not None), clear=_forget
)


def take(key: CacheKey) -> Executable | None:
    """The program of ``key``, if it was loaded ahead."""
    return _InUse.prefetch.take(key) if _InUse.prefetch is not None else None


def note(key: CacheKey, placement: Placement) -> None:
    """List the program of ``key`` as used, for the script's next run."""
    if _InUse.prefetch is not None:
        _InUse.prefetch.note(key, placement)


def _script(client: DeviceClient) -> str:
    """A digest that identifies a script's runs: of its path, its device, and its place in the job."""
    first = client.local_devices()[0]
    # "python -c" and interactive sessions have no path: they share one note per folder
    path = os.path.realpath(sys.argv[0] if sys.argv and sys.argv[0] else ".")
    parts = (path, client.device_type, str(first.id), str(len(client.devices())))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read(file: Path) -> list[_Note]:
    try:
        notes = json.loads(file.read_bytes())
        return [(str(f), str(name), tuple(map(int, ids)), split) for f, name, ids, split in notes]
    except (OSError, ValueError, TypeError):
        return []  # no list, or one in another format: nothing is predicted


def _write(file: Path, notes: list[_Note]) -> None:
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        with atomic_file.replacing(file) as temporary:
            temporary.write_text(json.dumps(notes))
    except OSError as error:
        logger.debug("%s could not be written: %s", file, error)
