"""The seeds that a step drew, as places in its device's sequence of seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from xla_core.operators.plan import SEED
from xla_core.recording import random_state
from xla_core.recording.entry import Entry, operations_of
from xla_core.recording.step_key import Lift

# A step that advances the state by more seeds must have set it.
_MOST_DRAWN = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """The ``positions`` of seeds among a step's lifted integers, and the ``places`` of these seeds in the sequence.

    Places are counted from the state before the step, beginning with 1; ``count`` is the number of seeds by which
    the step advances the state. ``known`` is False if a seed is not in the sequence, because the step set the state
    or drew from another generator.
    """

    positions: tuple[int, ...]
    places: tuple[int, ...]
    count: int
    known: bool


def drawn_in(entries: Sequence[Entry], ints: Sequence[int], before: int, after: int) -> Drawn:
    """The seeds of a step with these entries and lifted integers, and these random states before and after."""
    positions = []
    for entry in operations_of(entries):
        seed = entry.kwargs.get(SEED) if entry.plan.random else None
        if isinstance(seed, Lift):
            positions.append(seed.position)
    count = random_state.distance(before, after)
    if count > _MOST_DRAWN:
        return Drawn(tuple(positions), (), 0, False)
    numbers = random_state.seeds_after(before, np.arange(1, count + 1, dtype=np.uint64))
    places = {int(seed): place for place, seed in enumerate(numbers, 1)}
    drawn = [places.get(ints[position], 0) for position in positions]
    return Drawn(tuple(positions), tuple(drawn), count, all(drawn))
