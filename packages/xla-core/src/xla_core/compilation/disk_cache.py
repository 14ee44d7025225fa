"""Compiled programs on disk, shared by processes and by runs.

Loading an executable runs machine code from the file, so anyone who can write to the directory can
run code as the reader. The directory is created for its user alone (0700), and one that others
can write to is refused unless ``XLA_PERSISTENT_CACHE_ALLOW_SHARED=1`` says that they are trusted.

A file is named by the SHA-256 of its key and contains the whole key: an entry is used only if every
entry of the key is equal byte for byte. The layout is ``magic, version, lengths, header checksum, key
(zlib), payload, checksum of both``. A file is written under a temporary name, flushed to the disk
and renamed, so that a reader sees a complete entry or none; any other file is a miss. With a key of the user
(``cache_secret``), the last checksum is a signature, and a directory that others can write to is safe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import logging
import os
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from xla_core.compilation import cache_secret
from xla_core.compilation.cache_size import SizeBound, used
from xla_core.support import flags

logger = logging.getLogger(__name__)

SUFFIX: Final = ".xlaexe"

_MAGIC: Final = b"XLA-CACHE\n"
_FORMAT_VERSION: Final = 1
_SIGNED: Final = 0x8000  # added to the version of an entry that is signed
# magic, format version, bytes of the compressed key, bytes of the key, bytes of the payload
_HEADER: Final = struct.Struct("<10sHQQQ")
_HEADER_SUM: Final = struct.Struct("<I")
_DIGEST_SIZE: Final = hashlib.sha256().digest_size
_COUNT: Final = struct.Struct("<I")
_LENGTHS: Final = struct.Struct("<IQ")
_TEMPORARY_PREFIX: Final = ".writing-"
# a file that a killed writer left behind; a living one writes for seconds
_ABANDONED_SECONDS: Final = 3600.0
# keys hold a whole program: cheap compression, as it runs between compiling and the first step
_KEY_LEVEL: Final = 1
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

MSG_REFUSED: Final = (
    "the persistent cache {path} is refused: {reason}. Loading a cached program runs code from its "
    "file, so anyone who can write there can run code as you. Make it accessible only to you "
    "(chmod 700 {path}), choose another directory, or set XLA_PERSISTENT_CACHE_ALLOW_SHARED=1 if "
    "you trust everyone who can write to it. With XLA_PERSISTENT_CACHE_KEY_FILE only programs signed with "
    "your key are loaded, wherever they are"
)
MSG_TOO_LARGE: Final = (
    "a program of {size} MiB is not stored in the persistent cache {path}, which may have {limit} MiB "
    "(XLA_PERSISTENT_CACHE_MAX_MB)"
)
MSG_UNUSABLE: Final = (
    "the persistent cache {path} cannot be {action}: {error}. Training continues without it"
)
MSG_BAD_ENTRY: Final = "the persistent cache entry {path} is {fault}; {consequence}"
MSG_NOT_WRITTEN: Final = (
    "the persistent cache entry {path} could not be written: {error}. Training continues; further "
    "failures of this kind are not reported"
)
MSG_REFUSED_PROGRAM: Final = (
    "the stored program {program} could not be loaded: {error}. It is compiled again and replaced"
)


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Everything a compiled program depends on: named byte strings in a fixed order.

    Names are unique, values are compared in full. ``program`` names the step in log lines only.
    """

    entries: tuple[tuple[str, bytes], ...]
    program: str = ""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.entries]
        if len(set(names)) != len(names):
            raise ValueError(f"a cache key has two entries of one name: {sorted(names)}")

    @classmethod
    def of(cls, entries: Mapping[str, bytes | str], program: str = "") -> CacheKey:
        """A key from a mapping in its order; text is encoded as UTF-8."""
        encoded = ((n, v.encode() if isinstance(v, str) else v) for n, v in entries.items())
        return cls(tuple(encoded), program)

    @functools.cached_property
    def encoded(self) -> bytes:
        """All entries as one unambiguous byte string, in which lengths precede names and values."""
        parts = [_COUNT.pack(len(self.entries))]
        for name, value in self.entries:
            label = name.encode()
            parts += (_LENGTHS.pack(len(label), len(value)), label, value)
        return b"".join(parts)

    @classmethod
    def decode(cls, encoded: bytes) -> CacheKey:
        """Decode a key. Raises struct.error or ValueError if ``encoded`` is not a key."""
        (count,) = _COUNT.unpack_from(encoded)
        position = _COUNT.size
        entries = []
        for _ in range(count):
            label, value = _LENGTHS.unpack_from(encoded, position)
            position += _LENGTHS.size
            name = encoded[position : position + label].decode()
            entries.append((name, encoded[position + label : position + label + value]))
            position += label + value
        return cls(tuple(entries))

    @functools.cached_property
    def file_name(self) -> str:
        """The SHA-256 of all entries, and the suffix."""
        return hashlib.sha256(self.encoded).hexdigest() + SUFFIX

    def log(self) -> None:
        """Write one DEBUG line per entry: its size, its SHA-256 and how it begins.

        These lines show why two runs that should share an entry do not.
        """
        if logger.isEnabledFor(logging.DEBUG):
            for name, value in self.entries:
                digest = hashlib.sha256(value).hexdigest()
                logger.debug(
                    "cache key of %s: %s: %d bytes, sha256 %s, %r",
                    self.program or self.file_name, name, len(value), digest, value[:60],
                )  # fmt: skip


class CacheRefusedError(RuntimeError):
    """Other users can write to the cache directory."""


class _BadEntryError(Exception):
    """A file is not a valid entry; the message ends a sentence that begins with 'the entry is'."""


class PersistentCache:
    """Payloads by ``CacheKey`` in one directory, ``path``; safe for several processes at a time.

    With ``readonly`` (default: False), nothing is written, and damaged files are not removed. After construction,
    no failure of the file system raises: ``get`` returns None, ``put`` returns False, and a warning says why, once
    per file or kind of failure. Raises CacheRefusedError for a directory that other users can write to unless
    ``allow_shared`` (default: the environment's ``XLA_PERSISTENT_CACHE_ALLOW_SHARED``) or entries are signed
    (``XLA_PERSISTENT_CACHE_KEY_FILE``), CacheKeyFileError for a file without a key.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        readonly: bool = False,
        *,
        allow_shared: bool | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.readonly = readonly
        if allow_shared is None:
            allow_shared = flags.CACHE_ALLOW_SHARED.get()
        self._warned: set[str] = set()
        self._secret = cache_secret.from_environment()
        limit = flags.CACHE_MAX_MB.get() << 20
        self._bound = SizeBound(self.path, SUFFIX, limit) if limit > 0 else None
        self._usable = self._prepare(allow_shared or self._secret is not None)

    def get(self, key: CacheKey) -> bytes | None:
        """The payload stored under an equal key, or None."""
        key.log()
        if not self._usable:
            return None
        path = self.path / key.file_name
        try:
            payload = _decode(path.read_bytes(), key, self._secret)
            if self._bound is not None and not self.readonly:
                used(path)
            return payload
        except FileNotFoundError:
            return None
        except _BadEntryError as fault:
            consequence = "it is ignored" if self.readonly else "it is ignored and replaced"
            self._warn_once(
                str(path), MSG_BAD_ENTRY.format(path=path, fault=fault, consequence=consequence)
            )
        except (OSError, MemoryError) as error:
            self._warn_once("read", MSG_UNUSABLE.format(path=path, action="read", error=error))
        return None

    def entry(self, file_name: str) -> tuple[CacheKey, bytes] | None:
        """Key and payload of the file with this name; None, without a warning, if it is not usable."""
        if not self._usable:
            return None
        try:
            content = (self.path / file_name).read_bytes()
            packed_size, _, _ = _decode_header(content, self._secret)
            start = _HEADER.size + _HEADER_SUM.size
            key = CacheKey.decode(_unpacked(memoryview(content)[start : start + packed_size]))
            return (
                (key, _decode(content, key, self._secret)) if key.file_name == file_name else None
            )
        except (OSError, MemoryError, ValueError, struct.error, _BadEntryError):
            return None

    def put(self, key: CacheKey, payload: bytes) -> bool:
        """Store ``payload``; returns whether it is on the disk now. Always False for a read-only cache."""
        if self.readonly or not self._usable:
            return False
        path = self.path / key.file_name
        try:
            content = _encode(key, payload, self._secret)
            if self._bound is not None and not self._bound.takes(len(content)):
                facts = {"size": len(content) >> 20, "limit": flags.CACHE_MAX_MB.get()}
                self._warn_once("large", MSG_TOO_LARGE.format(path=self.path, **facts))
                return False
            _write(path, content)
            if self._bound is not None:
                self._bound.wrote(len(content))
        except (OSError, MemoryError) as error:
            kind = f"write {getattr(error, 'errno', None)}"
            self._warn_once(kind, MSG_NOT_WRITTEN.format(path=path, error=error))
            return False
        self._warned.discard(str(path))
        return True

    def _prepare(self, allow_shared: bool) -> bool:
        """Create, check and tidy the directory; returns whether it can be used."""
        try:
            if not self.readonly:
                # parents get the user's usual mode; the directory itself is private from the start
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir(mode=0o700)
            status = self.path.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
            os.scandir(self.path).close()
        except OSError as error:
            self._warn_once(
                "open", MSG_UNUSABLE.format(path=self.path, action="opened", error=error)
            )
            return False
        reason = None if allow_shared else _why_not_private(status)
        if reason is not None:
            raise CacheRefusedError(MSG_REFUSED.format(path=self.path, reason=reason))
        if not self.readonly:
            _remove_abandoned(self.path)
        return True

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning(text)


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """One file of a cache, for tools; reading it runs no code of the file.

    ``path`` and ``nbytes`` are the file's. ``program`` is the step's name, ``operations`` the number of its
    operations (0 if unknown). ``key`` has the entries of its key. For a damaged file it is empty, and ``fault``
    says what is wrong. ``used`` is the Unix time of the last access, as reported by the file system.
    """

    path: Path
    nbytes: int
    used: float
    program: str
    operations: int
    key: Mapping[str, bytes]
    fault: str | None


def entries(directory: str | os.PathLike[str]) -> list[CacheEntry]:
    """Every entry in a cache's directory, checked in full. Raises OSError if it cannot be listed."""
    secret = cache_secret.from_environment()
    return [_inspect(path, secret) for path in sorted(Path(directory).glob("*" + SUFFIX))]


def _inspect(path: Path, secret: bytes | None) -> CacheEntry:
    status = path.stat()
    key: dict[str, bytes] = {}
    fault = None
    try:
        content = path.read_bytes()
    except OSError as error:
        fault = f"not readable: {error}"
    else:
        # looking at a program is no use of it: tools that remove old ones go by this time
        with contextlib.suppress(OSError):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        try:
            key = _decode_key(content, secret)
        except _BadEntryError as error:
            fault = str(error)
    text = key.get("program", b"")
    name = f"step_{hashlib.sha256(text).hexdigest()[:12]}" if text else path.stem[:12]
    used = max(status.st_atime, status.st_mtime)
    recorded = text.partition(b"\noutputs ")[0].splitlines()
    operations = sum(not line.startswith(b"input ") for line in recorded)
    return CacheEntry(path, status.st_size, used, name, operations, key, fault)


def _decode_key(content: bytes, secret: bytes | None) -> dict[str, bytes]:
    """The key entries of a file. Raises _BadEntryError unless all of the file is as written."""
    packed, _, _ = _checked(content, secret)
    encoded = _unpacked(packed)
    values: dict[str, bytes] = {}
    position = _COUNT.size
    while position < len(encoded):
        name_size, value_size = _LENGTHS.unpack_from(encoded, position)
        position += _LENGTHS.size
        name = encoded[position : position + name_size].decode()
        position += name_size
        values[name] = encoded[position : position + value_size]
        position += value_size
    return values


class _InUse:
    """The process's cache; the environment decides unless ``initialize`` came first."""

    lock = threading.Lock()
    decided = False
    cache: PersistentCache | None = None


def initialize(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Use the cache in ``path`` from now on, for programs that are not compiled yet.

    Raises CacheRefusedError for a directory that other users can write to.
    """
    cache = PersistentCache(path, readonly)
    with _InUse.lock:
        _InUse.cache, _InUse.decided = cache, True


def current() -> PersistentCache | None:
    """The cache in use, or None.

    Without ``initialize`` the environment decides, at the first call: XLA_PERSISTENT_CACHE_PATH
    and XLA_PERSISTENT_CACHE_READ_ONLY. Raises CacheRefusedError like ``initialize``.
    """
    if not _InUse.decided:
        with _InUse.lock:
            path = flags.CACHE_PATH.get()
            if path and not _InUse.decided:
                _InUse.cache = PersistentCache(path, flags.CACHE_READ_ONLY.get())
            _InUse.decided = True
    return _InUse.cache


def warn_unusable(key: CacheKey | None, error: Exception) -> None:
    """Say that the plugin refused a stored program, which is then compiled and stored again."""
    program = key.program or key.file_name if key is not None else "a program"
    logger.warning(MSG_REFUSED_PROGRAM.format(program=program, error=error))


def _why_not_private(status: os.stat_result) -> str | None:
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"it belongs to user id {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS_WRITE:
        return f"other users can write to it (mode {mode:04o})"
    return None


def _encode(key: CacheKey, payload: bytes, secret: bytes | None) -> bytes:
    packed = zlib.compress(key.encoded, _KEY_LEVEL)
    version = _FORMAT_VERSION if secret is None else _FORMAT_VERSION | _SIGNED
    header = _HEADER.pack(_MAGIC, version, len(packed), len(key.encoded), len(payload))
    head = header + _HEADER_SUM.pack(zlib.crc32(header))
    return b"".join((head, packed, payload, cache_secret.seal(secret, head, (packed, payload))))


def _decode(content: bytes, key: CacheKey, secret: bytes | None) -> bytes:
    """The payload of a file's ``content``. Raises _BadEntryError unless all of it is as written."""
    packed, key_size, payload = _checked(content, secret)
    if key_size != len(key.encoded) or _unpacked(packed) != key.encoded:
        raise _BadEntryError("the entry of another program")
    return bytes(payload)


def _checked(content: bytes, secret: bytes | None) -> tuple[memoryview, int, memoryview]:
    """Compressed key, size of the key, and payload. Raises _BadEntryError unless all is as it was sealed."""
    packed_size, key_size, payload_size = _decode_header(content, secret)
    start = _HEADER.size + _HEADER_SUM.size
    middle, end = start + packed_size, start + packed_size + payload_size
    if len(content) != end + _DIGEST_SIZE:
        raise _BadEntryError(f"torn: {len(content)} bytes of {end + _DIGEST_SIZE}")
    body = memoryview(content)
    if not cache_secret.is_sealed(
        body[end:], cache_secret.seal(secret, content[:start], (body[start:end],))
    ):
        also = "" if secret is None else ", or it is signed with another key"
        raise _BadEntryError(f"damaged: its checksum does not match{also}")
    return body[start:middle], key_size, body[middle:end]


def _unpacked(packed: memoryview) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise _BadEntryError(f"damaged: {error}") from error


def _decode_header(content: bytes, secret: bytes | None) -> tuple[int, int, int]:
    """Sizes of compressed key, key and payload."""
    if not content.startswith(_MAGIC[: len(content)]) or not content:
        raise _BadEntryError("not a cache entry" if content else "empty")
    if len(content) < _HEADER.size + _HEADER_SUM.size:
        raise _BadEntryError(f"torn: only {len(content)} bytes")
    (checksum,) = _HEADER_SUM.unpack_from(content, _HEADER.size)
    if zlib.crc32(content[: _HEADER.size]) != checksum:
        raise _BadEntryError("damaged: the checksum of its header does not match")
    _, version, packed_size, key_size, payload_size = _HEADER.unpack_from(content)
    signed = bool(version & _SIGNED)
    version &= ~_SIGNED
    if signed and secret is None:
        raise _BadEntryError("signed, and XLA_PERSISTENT_CACHE_KEY_FILE names no key")
    if secret is not None and not signed:
        raise _BadEntryError("not signed")
    if version != _FORMAT_VERSION:
        raise _BadEntryError(f"of format version {version}, this is version {_FORMAT_VERSION}")
    return packed_size, key_size, payload_size


def _write(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # an interrupt too must not leave the file behind
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    # without it a power cut may undo the rename; the entry itself would then be missing, not wrong
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    oldest = time.time() - _ABANDONED_SECONDS
    # another process may remove the same files at the same time
    with contextlib.suppress(OSError):
        for temporary in directory.glob(_TEMPORARY_PREFIX + "*"):
            with contextlib.suppress(OSError):
                if temporary.stat().st_mtime < oldest:
                    temporary.unlink()
