"""Files of checkpoints whose checksums are known: taken while they are written, compared when they are read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import IO, Any, Final, ParamSpec, TypeVar

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
    """A stream that is written from its beginning to its end, and the checksum of what it was given."""

    def __init__(self, stream: IO[bytes], written: Written) -> None:
        self._stream = stream
        self._written = written
        self._sum = hashlib.sha256()
        self._size = 0

    def write(self, data: StateValue) -> int:
        """Write bytes. Raises OSError as the file does, which is remembered: torch's writer may not pass it on."""
        try:
            count = self._stream.write(data)
        except OSError as error:
            self._written.error = error
            raise
        self._sum.update(data)
        self._size += memoryview(data).nbytes
        return count

    def total(self) -> Sum:
        """Size and checksum of all that was written."""
        return self._size, self._sum.hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Written:
    """What one process wrote of a checkpoint: its files' checksums by name, and how writing failed."""

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.error: OSError | None = None


class SummedFiles:
    """A file system of ``torch.distributed.checkpoint``, which notes in ``written`` what is written through it."""

    def __init__(self, files: Any, written: Written) -> None:
        self._files = files
        self._written = written

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; that of one written counts when it is closed."""
        if mode != "wb":
            with self._files.create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with self._files.create_stream(path, mode) as stream:
                summed = _SummedStream(stream, self._written)
                yield summed
        except OSError as error:  # also where what was buffered does not go to the disk
            self._written.error = error
            raise
        self._written.sums[_name(path)] = summed.total()

    def rename(self, path: Any, new_path: Any) -> None:
        """Give a file another name."""
        self._files.rename(path, new_path)
        checksum = self._written.sums.pop(_name(path), None)
        if checksum is not None:
            self._written.sums[_name(new_path)] = checksum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def raising_errors_of_files(
    work: Callable[Arguments, Result], written: Written
) -> Callable[Arguments, Result]:
    """``work``, which raises the OSError that a file failed with, in place of what torch's writer made of it.

    The other processes are told of what is raised, and have to know that too.
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


def _name(path: Any) -> str:
    return PurePath(str(path)).name


def fault(files: object, folder: str, sums: Mapping[str, Sum]) -> str | None:
    """What is wrong with the first file in ``folder`` that is not as it was written; None if all are.

    ``files`` is a file system of fsspec.
    """
    for name, (size, wanted) in sorted(sums.items()):
        path = f"{folder}/{name}"
        try:
            got_size, got = _read(files, path)
        except FileNotFoundError:
            return MSG_MISSING.format(path=path)
        except OSError as error:
            return f"{path}: {error}"
        if got_size != size:
            return MSG_SIZE.format(path=path, got=got_size, wanted=size)
        if got != wanted:
            return MSG_SUM.format(path=path, got=got, wanted=wanted)
    return None


def _read(files: Any, path: str) -> Sum:
    digest, size = hashlib.sha256(), 0
    with files.open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()
