"""The directories of a manager's checkpoints: one for each, below a path of any kind that fsspec supports.

A checkpoint is complete once its directory has a record with the checksums of all files, which is written last.
Nothing is ever written into the directory of a complete checkpoint, so that an interrupted save cannot damage it. A
local directory that is not complete yet, or is being removed, contains a mark. Its writer holds a lock on the mark
as long as it lives: a mark without a lock shows the next manager that its writer has died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import io
import json
import logging
import pickle
import posixpath
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from xla_core.extension_api import distributed, training
from xla_spmd.checkpoint.checked_files import (
    Sum,
    SummedFiles,
    Written,
    fault,
    raising_errors_of_files,
)

logger = logging.getLogger(__name__)

RECORD: Final = ".manager_metadata"
MARK: Final = ".incomplete"

_NEW: Final = ".new-"
# The names of checkpoints' directories. An empty one is left if a process died while it removed a checkpoint.
_OURS: Final = re.compile(r"\d+(-\d+)?")

MSG_IGNORED: Final = "%s: ignoring these directories, which are not complete checkpoints: %s"
MSG_LEFT: Final = (
    "%s: removed these incomplete checkpoints of processes that ended while they wrote: %s"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One complete checkpoint: its step, the time at which it was taken, the name of its directory, and ``sums``.

    The time has a time zone: a run may go on in another one, and clocks are set back once a year.
    ``sums`` has the checksums of its files by name. It is empty for checkpoints that torch_xla wrote.
    """

    step: int
    time: datetime.datetime
    name: str
    sums: Mapping[str, Sum] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """The content of the record's file, with a checksum of its own."""
        fields = {"step": self.step, "time": self.time.isoformat(), "files": self.sums}
        return json.dumps(fields | {"sum": _sum_of(fields)}).encode()


def _sum_of(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Storage:
    """The directories below ``path``: a local path, or an address such as ``gs://bucket/run``."""

    def __init__(self, path: str) -> None:
        self._files, self._root = url_to_fs(path)
        self._path = path
        self._is_url = "://" in path
        self._marks: dict[str, IO[bytes]] = {}

    def tidied(self) -> list[Record]:
        """Remove incomplete checkpoints of processes that died (from local paths), and return ``records()``."""
        self._files.makedirs(self._root, exist_ok=True)
        if self._is_url:
            return self.records()
        left = [mark.parent.name for mark in Path(self._root).glob(f"*/{MARK}")]
        removed = [name for name in left if self._remove_left(name)]
        for folder in Path(self._root).iterdir():
            if _OURS.fullmatch(folder.name):
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()
        if removed:
            logger.warning(MSG_LEFT, self._path, sorted(removed))
        return self.records()

    def records(self) -> list[Record]:
        """The records of the complete checkpoints, oldest first. Other directories are named in the log."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.invalidate_cache(self._root)
        complete, ignored = [], []
        for path in self._files.ls(self._root, detail=False):
            name = posixpath.basename(path.rstrip("/"))
            record = self._record(name)
            if record is not None:
                complete.append(record)
            elif not name.startswith(_NEW):
                ignored.append(name)
        if ignored:
            logger.warning(MSG_IGNORED, self._path, sorted(ignored))
        return sorted(complete, key=lambda record: record.time)

    def _record(self, name: str) -> Record | None:
        try:
            content = self._files.cat_file(self._inside(name, RECORD))
            return _decoded(content, name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError):
            return None

    def begin(self, step: int) -> str:
        """The name of a new directory for a checkpoint of ``step``. Removes what interrupted saves left."""
        count = 0
        while True:
            name = f"{step}-{count}" if count else str(step)
            if not self._files.exists(self._inside(name)) or self._remove_left(name):
                break
            count += 1
        if not self._is_url:
            self._make(name)
        return name

    def _make(self, name: str) -> None:
        """Create the directory of a checkpoint, together with its mark."""
        # make it under another name first: it must never be seen without its mark
        folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=self._root))
        mark = (folder / MARK).open("wb")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.chmod(Path(self._root).stat().st_mode & 0o777)
            folder.rename(self._inside(name))
        except BaseException:
            mark.close()
            _remove(folder)
            raise
        self._marks[name] = mark

    def _remove_left(self, name: str) -> bool:
        """Remove a directory that is not a complete checkpoint, unless its writer lives. Returns whether it did."""
        if self._record(name) is not None:
            # it is complete, and its writer died before it could remove the mark
            with contextlib.suppress(OSError):
                Path(self._inside(name, MARK)).unlink(missing_ok=True)
            return False
        if self._is_url:
            self._files.rm(self._inside(name), recursive=True)
            return True
        try:
            with Path(self._inside(name, MARK)).open("rb") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(Path(self._inside(name)))
        except BlockingIOError:  # its writer is alive
            return False
        except FileNotFoundError:  # a manager without marks wrote it
            _remove(Path(self._inside(name)))
        return not Path(self._inside(name)).exists()

    def complete(self, record: Record) -> None:
        """Write the record, which makes the checkpoint complete. Then all of it is on the disk."""
        path = self._inside(record.name, RECORD)
        if self._is_url:
            self._files.pipe_file(path, record.encode())
            return
        training.sync_folder(Path(self._root))
        with training.replacing(Path(path)) as temporary:
            temporary.write_bytes(record.encode())
        Path(self._inside(record.name, MARK)).unlink(missing_ok=True)
        self._let_go(record.name)

    def abandon(self, name: str) -> None:
        """Remove what was written of a checkpoint that will not be completed."""
        if self._is_url:
            if self._files.exists(self._inside(name)):
                self._files.rm(self._inside(name), recursive=True)
            return
        # the record first, if there is one: an incomplete checkpoint must not look complete
        Path(self._inside(name, RECORD)).unlink(missing_ok=True)
        _remove(Path(self._inside(name)))
        self._let_go(name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint: its record first, so that a checkpoint with missing parts never looks complete."""
        record = self._inside(name, RECORD)
        if self._is_url:
            if self._files.exists(record):
                self._files.rm_file(record)
            self._files.rm(self._inside(name), recursive=True)
            return
        with contextlib.suppress(FileNotFoundError):
            Path(record).replace(self._inside(name, MARK))
        _remove(Path(self._inside(name)))

    def _let_go(self, name: str) -> None:
        mark = self._marks.pop(name, None)
        if mark is not None:
            mark.close()

    def fault(self, record: Record, part: int = 0, parts: int = 1) -> str | None:
        """A description of the first damaged file of a checkpoint, or None.

        Only every ``parts``-th file is read, beginning with number ``part`` (default: all files).
        """
        chosen = sorted(record.sums.items())[part::parts]
        return fault(self._files, self._inside(record.name), dict(chosen))

    def writer(self, name: str, threads: int, written: Written | None = None) -> StorageWriter:
        """The writer of a checkpoint in directory ``name``, with ``threads`` threads.

        It records in ``written`` (default: None) which files it wrote, and the error of a file.
        """
        path = self._inside(name, url=True)
        writer: FileSystemWriter = (
            distributed.fsspec_writer(path, threads)
            if self._is_url
            else FileSystemWriter(path, thread_count=threads, per_thread_copy_ahead=0)
        )
        if written is not None:
            writer.fs = SummedFiles(writer.fs, written)
            writer.write_data = raising_errors_of_files(writer.write_data, written)
            writer.finish = raising_errors_of_files(writer.finish, written)
        return writer

    def reader(self, name: str) -> StorageReader:
        """The reader of the checkpoint in directory ``name``."""
        path = self._inside(name, url=True)
        return distributed.fsspec_reader(path) if self._is_url else FileSystemReader(path)

    def path(self, name: str) -> str:
        """The path or address of directory ``name``, in the form in which the user gave the manager's path."""
        return self._inside(name, url=True)

    def _inside(self, *names: str, url: bool = False) -> str:
        return posixpath.join(self._path if url else self._root, *names)


def _remove(folder: Path) -> None:
    """Remove a directory, its mark last, so that a directory that is removed only partly keeps its mark."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def _decoded(content: bytes, name: str) -> Record:
    """The record in a file of this package, or in one of torch_xla, which is a pickle.

    Raises ValueError if the file is damaged.
    """
    if content.startswith(b"{"):
        fields = json.loads(content)
        if "sum" in fields and fields.pop("sum") != _sum_of(fields):
            raise ValueError(name)
        time = datetime.datetime.fromisoformat(fields["time"])
        sums = {
            file: (int(size), str(sum_)) for file, (size, sum_) in fields.get("files", {}).items()
        }
        return Record(int(fields["step"]), _with_zone(time), name, sums)
    pickled = _Unpickler(io.BytesIO(content)).load()
    return Record(int(pickled.step), _with_zone(pickled.ts), name)


def _with_zone(time: datetime.datetime) -> datetime.datetime:
    """``time``, which is this machine's time of day if it has no zone, as in records of torch_xla and of before."""
    return time if time.tzinfo is not None else time.astimezone()


class _TorchXlaRecord:
    """The class as which torch_xla's record is unpickled; it has ``step`` and ``ts``."""

    step: int
    ts: datetime.datetime


class _Unpickler(pickle.Unpickler):
    """Reads torch_xla's record, and refuses all other classes, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> object:
        """The two classes in a record. Raises UnpicklingError for others."""
        if (module, name) == ("datetime", "datetime"):
            return datetime.datetime
        if name == "_CheckpointMetadata":
            return _TorchXlaRecord
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's record")
