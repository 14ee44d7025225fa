"""Checksums of a checkpoint's files: computed while they are written, compared before they are read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import IO, Final, ParamSpec, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystemBase

from xla_core.contract.foreign_values import Attribute, ForeignObject
from xla_spmd.checkpoint.state_dicts import StateValue

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Sum = tuple[int, str]
"""A file's size in bytes and its SHA-256."""

MSG_MISSING: Final = "{path} is missing"
MSG_SIZE: Final = "{path} has {got} bytes, and {wanted} were written"
MSG_SUM: Final = "{path} is damaged: its SHA-256 is {got}, and was {wanted} when it was written"

_PIECE: Final = 1 << 20


class _SummedStream:
    """A stream that is written from beginning to end, and the checksum of what was written."""

    def __init__(self, stream: IO[bytes], written: Written) -> None:
        self._stream = stream
        self._written = written
        self._sum = hashlib.sha256()
        self._size = 0

    def write(self, data: StateValue) -> int:
        """Write bytes. An OSError of the file is stored before it is raised, since torch's writer may hide it."""
        try:
            count = self._stream.write(data)
        except OSError as error:
            self._written.error = error
            raise
        self._sum.update(data)
        self._size += memoryview(data).nbytes
        return count

    def total(self) -> Sum:
        """Size and checksum of everything that was written."""
        return self._size, self._sum.hexdigest()

    def __getattr__(self, name: str) -> Attribute:
        return getattr(self._stream, name)


class Written:
    """The part of a checkpoint that one process wrote: its files' checksums by name, and the error, if any."""

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.error: OSError | None = None


class SummedFiles:
    """A file system of ``torch.distributed.checkpoint`` that records in ``written`` what is written through it."""

    def __init__(self, files: FileSystemBase, written: Written) -> None:
        self._files = files
        self._written = written

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Iterator[IO[bytes] | _SummedStream]:
        """Open a file. The checksum of a file that is written is recorded when the file is closed."""
        if mode != "wb":
            with self._files.create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with self._files.create_stream(path, mode) as stream:
                summed = _SummedStream(stream, self._written)
                yield summed
        except OSError as error:  # also from writing buffered data when the file is closed
            self._written.error = error
            raise
        self._written.sums[_name(path)] = summed.total()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and its recorded checksum."""
        self._files.rename(path, new_path)
        checksum = self._written.sums.pop(_name(path), None)
        if checksum is not None:
            self._written.sums[_name(new_path)] = checksum

    def __getattr__(self, name: str) -> Attribute:
        return getattr(self._files, name)


def raising_errors_of_files(
    work: Callable[Arguments, Result], written: Written
) -> Callable[Arguments, Result]:
    """``work``, but if a file failed with an OSError, that error is raised instead of the one of torch's writer.

    torch sends the raised error to the other processes, which need the error number, too.
    """

    @functools.wraps(work)
    def run(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return work(*args, **named)
        except Exception as error:
            if written.error is None or isinstance(error, OSError):
                raise
            raise OSError(written.error.errno, written.error.strerror) from error

    return run


def _name(path: str | os.PathLike[str]) -> str:
    return PurePath(str(path)).name


def fault(files: object, folder: str, sums: Mapping[str, Sum]) -> str | None:
    """A description of the first file in ``folder`` that differs from its checksum in ``sums``; None if none does.

    ``files`` is a file system of fsspec.
    """
    for name, (size, digest) in sorted(sums.items()):
        path = f"{folder}/{name}"
        try:
            read_size, read_digest = _read(files, path)
        except FileNotFoundError:
            return MSG_MISSING.format(path=path)
        except OSError as error:
            return f"{path}: {error}"
        if read_size != size:
            return MSG_SIZE.format(path=path, got=read_size, wanted=size)
        if read_digest != digest:
            return MSG_SUM.format(path=path, got=read_digest, wanted=digest)
    return None


def _read(files: ForeignObject, path: str) -> Sum:
    digest, size = hashlib.sha256(), 0
    with files.open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()
