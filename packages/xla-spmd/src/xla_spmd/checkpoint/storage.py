"""Where a manager's checkpoints are: one directory each, below one path of any kind that fsspec knows.

A checkpoint counts once its directory has a record, which is written last. Nothing is ever written into
the directory of one that counts, so an interrupted save leaves it as it was.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import logging
import pickle
import posixpath
from typing import Any, Final

from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from xla_core.extension_api import distributed

logger = logging.getLogger(__name__)

RECORD: Final = ".manager_metadata"


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One complete checkpoint: its step, when it was taken, and its directory's name."""

    step: int
    time: datetime.datetime
    name: str

    def encode(self) -> bytes:
        """As the file that says the checkpoint is complete."""
        return json.dumps({"step": self.step, "time": self.time.isoformat()}).encode()


class Storage:
    """The directories below ``path``: a local path, or an address such as ``gs://bucket/run``."""

    def __init__(self, path: str) -> None:
        self._files, self._root = url_to_fs(path)
        self._path = path
        self._is_url = "://" in path

    def records(self) -> list[Record]:
        """The complete checkpoints, oldest first; what is not one is named in the log."""
        self._files.makedirs(self._root, exist_ok=True)
        found, ignored = [], []
        for path in self._files.ls(self._root, detail=False):
            name = posixpath.basename(path.rstrip("/"))
            record = self._record(name)
            if record is None:
                ignored.append(name)
            else:
                found.append(record)
        if ignored:
            logger.warning("%s: these are no complete checkpoints: %s", self._path, sorted(ignored))
        return sorted(found, key=lambda record: record.time)

    def _record(self, name: str) -> Record | None:
        try:
            content = self._files.cat_file(self._inside(name, RECORD))
            return _decoded(content, name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError):
            return None

    def new_name(self, step: int) -> str:
        """The name of a directory for a checkpoint of ``step``; what an interrupted save left is removed."""
        count = 0
        while True:
            name = f"{step}-{count}" if count else str(step)
            if not self._files.exists(self._inside(name)):
                return name
            if self._record(name) is None:
                self.remove(name)
                return name
            count += 1

    def complete(self, record: Record) -> None:
        """From now on the checkpoint counts."""
        self._files.pipe_file(self._inside(record.name, RECORD), record.encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint; its record goes first, so that half of one never counts."""
        record = self._inside(name, RECORD)
        if self._files.exists(record):
            self._files.rm_file(record)
        self._files.rm(self._inside(name), recursive=True)

    def writer(self, name: str, threads: int) -> StorageWriter:
        """What writes a checkpoint into directory ``name``."""
        path = self._inside(name, url=True)
        if self._is_url:
            return distributed.fsspec_writer(path, threads)
        return FileSystemWriter(path, thread_count=threads, per_thread_copy_ahead=0)

    def reader(self, name: str) -> StorageReader:
        """What reads the checkpoint in directory ``name``."""
        path = self._inside(name, url=True)
        return distributed.fsspec_reader(path) if self._is_url else FileSystemReader(path)

    def _inside(self, *names: str, url: bool = False) -> str:
        return posixpath.join(self._path if url else self._root, *names)


def _decoded(content: bytes, name: str) -> Record:
    """A record of this package's, or of torch_xla's, which is a pickle."""
    if content.startswith(b"{"):
        fields = json.loads(content)
        time = datetime.datetime.fromisoformat(fields["time"])
        return Record(int(fields["step"]), time, name)
    found = _Unpickler(io.BytesIO(content)).load()
    return Record(int(found.step), found.ts, name)


class _Former:
    """What torch_xla's record is read as: ``step`` and ``ts``."""

    step: int
    ts: datetime.datetime


class _Unpickler(pickle.Unpickler):
    """Reads torch_xla's record, and refuses whatever is no part of one: it may run no code."""

    def find_class(self, module: str, name: str) -> Any:
        """The two classes of a record."""
        if (module, name) == ("datetime", "datetime"):
            return datetime.datetime
        if name == "_CheckpointMetadata":
            return _Former
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's record")
