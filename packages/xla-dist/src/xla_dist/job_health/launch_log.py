"""What each process of this host launched last, in memory that outlives the process.

gloo aborts a process whose partner calls a collective of another size, before the process can tell
anybody what it was about to do. The launcher gives its processes a piece of shared memory, and the
survivors read there what the dead one had launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_RUNS: Final = 64
# The number of runs begun; then for each of the last runs its program's digest and its repetitions.
_ROW: Final = 1 + 2 * _RUNS


class Ledger:
    """One row per process of this host; ``ordinal`` of the first is ``base``. Pickles to children only."""

    def __init__(self, array: Any, base: int) -> None:
        self._array = array
        self._base = base
        self._count = len(array) // _ROW

    @classmethod
    def create(cls, context: Any, count: int, base: int) -> Ledger:
        """A ledger of ``count`` processes that ``context`` (of ``multiprocessing``) will start."""
        return cls(context.RawArray("Q", count * _ROW), base)

    def begin(self, ordinal: int, run: int, digest: str) -> None:
        """Replica ``ordinal`` launches, as its run number ``run``, the program ``digest`` (16 digits)."""
        row = (ordinal - self._base) * _ROW
        place = row + 1 + 2 * (run % _RUNS)
        self._array[place + 1] = 1
        self._array[place] = int(digest, 16)
        self._array[row] = run + 1  # last: what it counts is complete

    def repeat(self, ordinal: int, run: int, times: int) -> None:
        """The same program once more."""
        self._array[(ordinal - self._base) * _ROW + 2 + 2 * (run % _RUNS)] = times

    def since(self, ordinal: int, run: int) -> Iterator[tuple[int, str, int]]:
        """Number, digest and repetitions of runs from ``run`` on; none if some are lost already."""
        if not self._base <= ordinal < self._base + self._count:
            return
        row = (ordinal - self._base) * _ROW
        end = self._array[row]
        if end - run >= _RUNS:  # the process may be writing over the oldest
            return
        for number in range(run, end):
            place = row + 1 + 2 * (number % _RUNS)
            yield number, f"{self._array[place]:016x}", self._array[place + 1]
