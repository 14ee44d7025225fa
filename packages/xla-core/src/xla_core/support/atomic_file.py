"""Files that are either the old one or the new one, whatever interrupts the writing."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xla_core.support import indivisible

_MARK: Final = "saving"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to, which takes the place of ``path`` at the end of the block.

    It is on the disk before it is renamed. After an exception, or a process that was killed, the
    former file is still there; what a killed process left beside it is removed by the next save. A path that
    is no regular file (``/dev/null``, a pipe) is itself what to write to.

    Its name is the file's own up to the last dot: torch.save names the root folder of the archive so.
    """
    path = Path(os.path.realpath(path))  # a link keeps pointing where it points
    if path.exists() and not path.is_file():
        yield path  # a device or a pipe is written to: a file in its place would be the end of it
        return
    _remove_leftovers(path)
    # an object that closes its file when it is dropped, should an exception come before the line that does
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=_prefix(path), delete=False)  # noqa: SIM115
    temporary = Path(file.name)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # says that the file's writer is alive
        yield temporary
        os.fsync(file)
        temporary.chmod(_mode(path))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        file.close()
    sync_folder(path.parent)


def _prefix(path: Path) -> str:
    """How the names of files begin that take the place of ``path``: ``a.b.pt`` is ``a.b.saving-pt-``."""
    stem, _, suffix = path.name.rpartition(".")
    if not stem:  # no dot, or one that makes the file a hidden one
        stem, suffix = path.name, ""
    return f"{stem}.{_MARK}-{suffix}-"


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, or those that ``open`` would give."""
    if path.exists():
        return path.stat().st_mode & 0o777
    masks: list[int] = []
    # asking sets it: it is set back before any exception can come
    indivisible.do(map(masks.append, map(os.umask, (0,))), map(os.umask, masks))
    return 0o666 & ~masks[0]


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer is alive
            left.unlink()


def sync_folder(folder: Path) -> None:
    """Have the disk know which files a folder has; nothing where the file system cannot be asked to."""
    handles: list[int] = []
    opened = map(handles.append, map(os.open, (folder,), (os.O_RDONLY,)))
    try:
        # as a whole, so that no exception comes while it is open
        indivisible.do(opened, map(os.fsync, handles), map(os.close, handles))
    except OSError:  # some file systems refuse to sync a folder
        indivisible.do(map(os.close, handles))
