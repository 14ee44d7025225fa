"""Finds values that stay alive from step to step, which make the memory of a loop grow."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from xla_core.contract.device_protocol import Buffer
from xla_core.extension_api.source_location import Frame
from xla_core.extension_api.steps import Entry
from xla_debug.run_report.records import Survivor


class Births:
    """Watches the results of steps 1, 2, 4, 8, ... and finds those that are alive when the number has doubled.

    ``survivors`` has those that were found last.
    """

    def __init__(self) -> None:
        self.survivors: list[Survivor] = []
        self._step = 1
        self._born: list[tuple[Entry, dict[int, int], list[weakref.ref[object]]]] = []

    def made(self, last: Entry, outputs: dict[int, int], buffers: Sequence[Buffer]) -> None:
        """Watch the results of a program, if it is the turn of this step.

        ``last`` is the last entry of its step. ``outputs`` has the position in ``buffers`` of each value number.
        """
        if _is_power(self._step):
            self._born.append((last, dict(outputs), [weakref.ref(b) for b in buffers]))

    def step_ended(self) -> None:
        """A step ended: find the survivors, if its number has doubled."""
        self._step += 1
        if _is_power(self._step):
            self.survivors = self._alive()
            self._born.clear()

    def _alive(self) -> list[Survivor]:
        bytes_of: Counter[Frame] = Counter()
        values: Counter[Frame] = Counter()
        for last, outputs, buffers in self._born:
            alive = {vid for vid, place in outputs.items() if buffers[place]() is not None}
            for entry in last.path() if alive else ():
                for vid in alive & set(range(entry.first, entry.end)):
                    meta, where = entry.metas[vid - entry.first], entry.where
                    if meta is not None and where is not None and where.frames:
                        bytes_of[where.frames[0]] += meta.nbytes
                        values[where.frames[0]] += 1
        return [Survivor(f, size, values[f]) for f, size in bytes_of.most_common()]


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
