"""Counts how often each line of the user's program recorded its operators in a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from xla_core.extension_api.source_location import Frame
from xla_core.extension_api.steps import Entry, operations_of
from xla_debug.steps.differences import name_of


class Spot(NamedTuple):
    """An operator at one place of one module.

    Equal layers have different scopes, and so different spots; the rounds of a loop have the same spot.
    """

    operator: str
    frames: tuple[Frame, ...]
    inner: Frame | None
    scope: str
    backward: bool


@dataclasses.dataclass(frozen=True)
class Rounds:
    """A spot that occurs ``after`` times in a step, and ``before`` times in a similar one."""

    spot: Spot
    before: int
    after: int


def counts(entries: Sequence[Entry]) -> Counter[Spot]:
    """How often each spot occurs among the operators of a step, without those of optimizers."""
    by_spot: Counter[Spot] = Counter()
    for entry in operations_of(entries):
        where = entry.where
        if where is not None and where.frames and not where.optimizer:
            by_spot[
                Spot(name_of(entry), where.frames, where.inner, where.scope, where.backward)
            ] += 1
    return by_spot


def changed_rounds(old: Sequence[Entry], new: Sequence[Entry]) -> Rounds | None:
    """The spot whose number of occurrences differs most; None if the steps have different spots as well.

    It is a spot of the forward pass, unless the forward passes are the same.
    """
    before, after = counts(old), counts(new)
    # ignore spots of the backward pass: sums of gradients appear only from the second round on
    if any(not spot.backward for spot in before.keys() ^ after.keys()):
        return None
    changed = [s for s in after if s in before and before[s] != after[s]]
    if not changed:
        return None
    forward = [s for s in changed if not s.backward]
    chosen = max(forward or changed, key=lambda s: abs(after[s] - before[s]))
    return Rounds(chosen, before[chosen], after[chosen])


def longest_loop(entries: Sequence[Entry]) -> tuple[Spot, int, int] | None:
    """The spot of the forward pass that occurs most often, how often it does, and the operators of its line."""
    by_spot = counts(entries)
    forward = {spot: n for spot, n in by_spot.items() if not spot.backward}
    if not forward:
        return None
    spot = max(forward, key=lambda s: forward[s])
    line = sum(n for s, n in by_spot.items() if s.frames[0] == spot.frames[0])
    return spot, forward[spot], line
