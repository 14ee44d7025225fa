"""Which seeds a step drew, as places in its device's sequence of random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from xla_core.operators.plan import SEED
from xla_core.recording import random_state
from xla_core.recording.entry import Entry, operations_of
from xla_core.recording.step_key import Lift

# A step that leaves the state so far from where it began has set it.
_MOST_DRAWN = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """``positions`` are those of seeds among a step's lifted integers, ``places`` the places of these seeds.

    The place counts from the state before the step, 1 for the first; ``count`` is how far the step advances it.
    ``known`` is False where seeds have no place there: the step set the state, or drew from another generator.
    """

    positions: tuple[int, ...]
    places: tuple[int, ...]
    count: int
    known: bool


def drawn_in(entries: Sequence[Entry], ints: Sequence[int], before: int, after: int) -> Drawn:
    """What a step has drawn: one with these entries and lifted integers, and these states around it."""
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
