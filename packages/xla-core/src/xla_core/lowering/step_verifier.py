"""Checks a recorded step before it is lowered: an inconsistent step is a bug in xla-core, and must not be run.

The lowering relies on these invariants:

- values are numbered in the order in which they are made, and are read only afterwards, with the shapes and
  dtypes that their readers saw;
- an operation reads only those lifted numbers that were lifted for it;
- an input gives its memory to at most one result, which has the same shape and dtype.

``operators.run_rule`` checks that the results of a rule have the recorded shapes and dtypes when it computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Input, Operation

MSG_INVALID: Final = (
    "the recorded step is inconsistent: {reason}. This is a bug in xla-core, and nothing was run; please report "
    "it with the script"
)


class InvalidStepError(RuntimeError):
    """A recorded step violates an invariant that lowering relies on."""

    def __init__(self, reason: str) -> None:
        super().__init__(MSG_INVALID.format(reason=reason))


def verify(
    entries: Sequence[Entry], outputs: Sequence[int], aliases: Sequence[tuple[int, int]]
) -> None:
    """Raise InvalidStepError if the step of ``entries`` violates an invariant.

    ``outputs`` are the numbers of the wanted values, ``aliases`` the pairs of an input's slot and the position
    of the output that reuses its memory. The time is linear in the operations and their operands.
    """
    metas: list[TensorMeta | None] = []
    inputs: list[int] = []
    floats = ints = 0
    for entry in entries:
        if entry.first != len(metas):
            raise InvalidStepError(
                f"{_name(entry)} begins at value {entry.first}, not {len(metas)}"
            )
        if isinstance(entry, Input):
            inputs.append(entry.first)
        else:
            _verify_operands(entry, metas, floats, ints)
        metas.extend(entry.metas)
        floats, ints = entry.floats, entry.ints
    _verify_outputs(outputs, metas)
    _verify_aliases(aliases, inputs, outputs, metas)


def _name(entry: Entry) -> str:
    name = entry.plan.name if isinstance(entry, Operation) else "an input"
    return f"{name} (operation {entry.depth})"


def _verify_operands(
    entry: Entry, metas: Sequence[TensorMeta | None], floats: int, ints: int
) -> None:
    for ref in entry.references():
        if not 0 <= ref.vid < len(metas):
            raise InvalidStepError(f"{_name(entry)} reads value {ref.vid}, which comes later")
        if metas[ref.vid] is not ref.meta:
            raise InvalidStepError(
                f"{_name(entry)} reads value {ref.vid} as {ref.meta}, and it is {metas[ref.vid]}"
            )
    for lift in entry.lifted():
        begin, end = (floats, entry.floats) if lift.is_float else (ints, entry.ints)
        if not begin <= lift.position < end:
            raise InvalidStepError(
                f"{_name(entry)} reads lifted number {lift.position}, its own are {begin} to {end}"
            )


def _verify_outputs(outputs: Sequence[int], metas: Sequence[TensorMeta | None]) -> None:
    for vid in outputs:
        if not 0 <= vid < len(metas) or metas[vid] is None:
            raise InvalidStepError(f"value {vid} is wanted, which no operation makes")


def _verify_aliases(
    aliases: Sequence[tuple[int, int]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    metas: Sequence[TensorMeta | None],
) -> None:
    given: set[int] = set()
    taken: set[int] = set()
    for slot, position in aliases:
        if not (0 <= slot < len(inputs) and 0 <= position < len(outputs)):
            raise InvalidStepError(
                f"input {slot} gives its memory to output {position}: no such pair"
            )
        if slot in given or position in taken:
            raise InvalidStepError(f"input {slot} or output {position} is in two donations")
        given.add(slot)
        taken.add(position)
        source, target = metas[inputs[slot]], metas[outputs[position]]
        if source is not target:
            raise InvalidStepError(
                f"input {slot} ({source}) gives its memory to output {position} ({target})"
            )
