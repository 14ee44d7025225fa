"""Where a manager's checkpoints are: one directory each, below one path of any kind that fsspec knows.

A checkpoint counts once its directory has a record, which is written last, and has the checksums of all files.
Nothing is ever written into the directory of one that counts, so an interrupted save leaves it as it was. A
local directory that does not count yet, or no more, has a mark, which its writer holds a lock on while it lives:
by that the next manager finds what a process left that died.
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
from typing import IO, Any, Final

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
# An empty one of them is what was left of one that was removed.
_OURS: Final = re.compile(r"\d+(-\d+)?")

MSG_IGNORED: Final = "%s: these are no complete checkpoints: %s"
MSG_LEFT: Final = "%s: removed what a process left that ended while it wrote: %s"


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One complete checkpoint: its step, when it was taken, its directory's name, and its files' checksums.

    Checkpoints of torch_xla have no checksums.
    """

    step: int
    time: datetime.datetime
    name: str
    sums: Mapping[str, Sum] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """As the file that says the checkpoint is complete."""
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
        """``records``, once what processes left that died while they wrote is removed (from local paths)."""
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
        """The complete checkpoints, oldest first; what is not one is named in the log."""
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
        """The name of a directory for a checkpoint of ``step``; what an interrupted save left is removed."""
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
        """Make a directory that has its mark from the start."""
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
        """Remove what is no complete checkpoint, unless its writer lives; whether it is removed."""
        if self._record(name) is not None:
            # complete, and killed before it could take the mark away
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
        except FileNotFoundError:  # of a manager that knew no marks
            _remove(Path(self._inside(name)))
        return not Path(self._inside(name)).exists()

    def complete(self, record: Record) -> None:
        """From now on the checkpoint counts; with the record on the disk, all of it is."""
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
        # the record, if it was the last thing to go wrong, before the rest; the mark with the rest
        Path(self._inside(name, RECORD)).unlink(missing_ok=True)
        _remove(Path(self._inside(name)))
        self._let_go(name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint; it ceases to count first, so that half of one never does."""
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
        """What is wrong with a checkpoint's files, by their checksums; of every ``parts``-th file only."""
        chosen = sorted(record.sums.items())[part::parts]
        return fault(self._files, self._inside(record.name), dict(chosen))

    def writer(self, name: str, threads: int, written: Written | None = None) -> StorageWriter:
        """What writes a checkpoint into directory ``name``, and notes in ``written`` what it wrote."""
        path = self._inside(name, url=True)
        writer: Any = (
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
        """What reads the checkpoint in directory ``name``."""
        path = self._inside(name, url=True)
        return distributed.fsspec_reader(path) if self._is_url else FileSystemReader(path)

    def path(self, name: str) -> str:
        """Where the checkpoint in directory ``name`` is, as the user wrote it."""
        return self._inside(name, url=True)

    def _inside(self, *names: str, url: bool = False) -> str:
        return posixpath.join(self._path if url else self._root, *names)


def _remove(folder: Path) -> None:
    """Remove a directory, its mark last: of one that is half removed it says so."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def _decoded(content: bytes, name: str) -> Record:
    """A record of this package's, or of torch_xla's, which is a pickle."""
    if content.startswith(b"{"):
        fields = json.loads(content)
        if "sum" in fields and fields.pop("sum") != _sum_of(fields):
            raise ValueError(name)
        time = datetime.datetime.fromisoformat(fields["time"])
        sums = {
            file: (int(size), str(sum_)) for file, (size, sum_) in fields.get("files", {}).items()
        }
        return Record(int(fields["step"]), time, name, sums)
    pickled = _Unpickler(io.BytesIO(content)).load()
    return Record(int(pickled.step), pickled.ts, name)


class _Former:
    """What torch_xla's record is read as: ``step`` and ``ts``."""

    step: int
    ts: datetime.datetime


class _Unpickler(pickle.Unpickler):
    """Reads torch_xla's record, and refuses whatever is no part of one: it may run no code."""

    def find_class(self, module: str, name: str) -> object:
        """The two classes of a record."""
        if (module, name) == ("datetime", "datetime"):
            return datetime.datetime
        if name == "_CheckpointMetadata":
            return _Former
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's record")
