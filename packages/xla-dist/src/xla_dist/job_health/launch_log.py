"""The latest launches of each process on this host, in memory that outlives the process.

gloo aborts a process whose partner calls a collective of another size, before the process can report
what it was about to do. The launcher therefore gives its processes a piece of shared memory, in which the
survivors read what the dead process had launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Final

from xla_core.contract.foreign_values import ForeignObject

_RUNS: Final = 64
# A row holds the number of runs begun, and for each of the last runs its program's digest and its repetitions.
_ROW: Final = 1 + 2 * _RUNS


class LaunchLog:
    """One row per process of this host, from ordinal ``base`` on. Can be pickled only for child processes."""

    def __init__(self, array: ForeignObject, base: int) -> None:
        self._array = array
        self._base = base
        self._count = len(array) // _ROW

    @classmethod
    def create(cls, context: BaseContext, count: int, base: int) -> LaunchLog:
        """A log for ``count`` processes that ``context`` (of ``multiprocessing``) will start."""
        return cls(context.RawArray("Q", count * _ROW), base)

    def begin(self, ordinal: int, run: int, digest: str) -> None:
        """Log that replica ``ordinal`` launches the program ``digest`` (16 digits) as its run number ``run``."""
        row = (ordinal - self._base) * _ROW
        place = row + 1 + 2 * (run % _RUNS)
        self._array[place + 1] = 1
        self._array[place] = int(digest, 16)
        self._array[row] = run + 1  # last, when the run is complete

    def repeat(self, ordinal: int, run: int, times: int) -> None:
        """Log that the program of run ``run`` has now been launched ``times`` times."""
        self._array[(ordinal - self._base) * _ROW + 2 + 2 * (run % _RUNS)] = times

    def since(self, ordinal: int, run: int) -> Iterator[tuple[int, str, int]]:
        """Number, digest and repetitions of the runs from ``run`` on; none if some of them are already lost."""
        if not self._base <= ordinal < self._base + self._count:
            return
        row = (ordinal - self._base) * _ROW
        end = self._array[row]
        if end - run >= _RUNS:  # the process may be overwriting the oldest run
            return
        for number in range(run, end):
            place = row + 1 + 2 * (number % _RUNS)
            yield number, f"{self._array[place]:016x}", self._array[place + 1]
