"""Explains differences between steps by statements in the user's source: a loop, a branch, code before a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from xla_core.extension_api.source_location import Frame
from xla_core.extension_api.steps import Entry, operations_of
from xla_debug.stacks import stack_frames, statements
from xla_debug.stacks.statements import Block
from xla_debug.steps.differences import Difference, count_operations
from xla_debug.steps.recompile_text import Cause, Words, place_of
from xla_debug.steps.repetitions import Rounds, changed_rounds

CauseAtLines = tuple[Cause, str, tuple[Frame, ...]]
"""A cause, its description, and the user's frames, the one to look at first."""

SEARCHED: Final = (Cause.BRANCH, Cause.STEP_END, Cause.MODE)
"""The causes for which a statement may be a better explanation."""


def find(
    old: Sequence[Entry],
    new: Sequence[Entry],
    difference: Difference,
    explained: Words,
    stack: tuple[Frame, ...],
    ran_once: bool,
) -> CauseAtLines | None:
    """The cause of a difference between two steps if a statement explains it, else None.

    ``explained`` is the explanation by the operators, ``stack`` has the user's frames at the end of the step, and
    ``ran_once`` tells whether the program of ``old`` ran only once.
    """
    if explained.cause not in SEARCHED:
        return None
    rounds = changed_rounds(old, new)
    if rounds is not None:
        return _of_rounds(rounds, old, new, stack)
    if ran_once:
        first = _only_before_the_loop(old, new, difference, stack)
        if first is not None:
            return first
    return _of_branch(old, new, explained, stack) if explained.cause is not Cause.MODE else None


def _of_rounds(
    rounds: Rounds, old: Sequence[Entry], new: Sequence[Entry], stack: tuple[Frame, ...]
) -> CauseAtLines:
    spot = rounds.spot
    if spot.backward:
        text = (
            f"the forward pass is the same, but with the backward pass there are {count_operations(new)} "
            f"operations, and {count_operations(old)} before: gradients go through earlier steps, "
            "whose graphs are kept"
        )
        return Cause.RETAINED, text, spot.frames
    text = f"{spot.operator} was recorded {rounds.after} times here, {rounds.before} times before"
    for frame in spot.frames:
        for loop in statements.loops_around(frame):
            if any(loop.holds(f) for f in stack):
                break  # this is the loop over the steps: it and those around it do not repeat lines inside a step
            header = Frame(frame.function, frame.filename, loop.header)
            text = (
                f"{spot.operator} in line {frame.line} was recorded {rounds.after} times, "
                f"{rounds.before} times before"
            )
            return Cause.LOOP, text, (header, *spot.frames)
    return Cause.LOOP, text, spot.frames


def _only_before_the_loop(
    old: Sequence[Entry], new: Sequence[Entry], difference: Difference, stack: tuple[Frame, ...]
) -> CauseAtLines | None:
    """The cause START, if the first step has operators of lines before the loop over the steps."""
    more = count_operations(old) - count_operations(new)
    around = map(statements.loops_around, stack)
    loops = next(filter(None, around), [])
    gone = list((_places(difference.old) - _places(difference.new)).elements())
    if not loops or not gone or more <= 0:
        return None
    if any(loop.holds(frame) for frames in gone for frame in frames for loop in loops):
        return None
    text = (
        f"the first step has {more} more operations, from this line on, which are before the loop: its program "
        "runs once, and the other steps need another one"
    )
    return Cause.START, text, min(gone, key=lambda frames: frames[0].line)


def _places(entries: Iterable[Entry]) -> Counter[tuple[Frame, ...]]:
    """How many operators among ``entries`` each stack of the user's lines has."""
    places = map(place_of, operations_of(tuple(entries)))
    return Counter(place.frames for place in places if place is not None and place.frames)


def _of_branch(
    old: Sequence[Entry], new: Sequence[Entry], explained: Words, stack: tuple[Frame, ...]
) -> CauseAtLines | None:
    """The cause BRANCH, if only one of the steps has lines in an arm of an ``if`` around the difference."""
    place = place_of(explained.entry)
    if place is None:
        return None
    for frame in place.frames:
        for arm in statements.arms_around(frame):
            if any(arm.holds(f) for f in stack):
                continue  # the loop over the steps is in this arm
            if not (_is_in(arm, old) and _is_in(arm, new)):
                header = Frame(frame.function, arm.filename, arm.header)
                text = f"`{stack_frames.source(header)}` took another branch than before: {explained.text}"
                return Cause.BRANCH, text, (header, *place.frames)
    return None


def _is_in(arm: Block, entries: Iterable[Entry]) -> bool:
    places = map(place_of, entries)
    return any(arm.holds(f) for place in places if place is not None for f in place.frames)
