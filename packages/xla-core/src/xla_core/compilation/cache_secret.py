"""The user's key for signing entries of the persistent cache, and the seal of an entry.

Without a key, an entry ends with a checksum, which shows that it is complete. With a key it ends with an HMAC,
which also shows that its writer had the key: other entries are misses, and their code never runs.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from xla_core.support import flags

_LEAST_BYTES: Final = 16

MSG_KEY: Final = (
    f"{flags.CACHE_KEY_FILE.name}={{path}}: {{problem}}. The file has the key that the persistent cache is signed "
    f"with: at least {_LEAST_BYTES} bytes that only you can read (head -c 32 /dev/urandom > FILE; chmod 600 FILE)"
)


class CacheKeyFileError(ValueError):
    """The file with the key of the persistent cache is unusable; the message says why."""


def from_environment() -> bytes | None:
    """The key in the file that the environment names, or None. Raises CacheKeyFileError for an unusable file."""
    path = flags.CACHE_KEY_FILE.get()
    if not path:
        return None
    try:
        mode = Path(path).stat().st_mode
        secret = Path(path).read_bytes()
    except OSError as error:
        raise CacheKeyFileError(MSG_KEY.format(path=path, problem=error.strerror)) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"others can access it (mode {stat.S_IMODE(mode):04o})"
        raise CacheKeyFileError(MSG_KEY.format(path=path, problem=problem))
    if len(secret) < _LEAST_BYTES:
        raise CacheKeyFileError(MSG_KEY.format(path=path, problem=f"it has {len(secret)} bytes"))
    return secret


def seal(secret: bytes | None, head: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    """The 32 bytes that seal an entry: a checksum of its ``parts``, or a signature of ``head`` and ``parts``."""
    if secret is None:
        checksum = hashlib.sha256()
        for part in parts:
            checksum.update(part)
        return checksum.digest()
    signature = hmac.new(secret, head, hashlib.sha256)
    for part in parts:
        signature.update(part)
    return signature.digest()


def is_sealed(seal: bytes | memoryview, wanted: bytes) -> bool:
    """Whether two seals are equal; the time taken does not reveal where they differ."""
    return hmac.compare_digest(bytes(seal), wanted)
