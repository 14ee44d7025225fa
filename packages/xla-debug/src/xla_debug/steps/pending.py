"""What a trace has recorded, looked at without changing what the step will be: xla-core's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_core.extension_api.steps import (
    Entry,
    Input,
    Lift,
    Operation,
    Ref,
    Root,
    map_operands,
    needed_entries,
)
from xla_core.extension_api.steps import graph_of as graph_of
from xla_core.extension_api.steps import is_pending as is_pending


def alone(entries: Sequence[Entry], outputs: Sequence[int]) -> tuple[list[Entry], tuple[int, ...]]:
    """Only what ``outputs`` need, as a step of its own: inputs, numbers and values are counted anew."""
    needed = {e.first for e in needed_entries(entries, outputs)}
    read = set(outputs)
    for entry in entries:
        if entry.first in needed:
            read.update(ref.vid for ref in entry.references())
    vids: dict[int, int] = {}
    lifted: dict[bool, list[int]] = {True: [], False: []}

    def renumbered(a: Any) -> Any:
        if isinstance(a, Ref):
            return Ref(vids[a.vid], a.meta)
        if isinstance(a, Lift):
            lifted[a.is_float].append(a.position)
            return Lift(a.is_float, len(lifted[a.is_float]) - 1, a.example)
        return a

    last: Entry = Root()
    for entry in entries:
        if isinstance(entry, Operation) and entry.first in needed:
            args = tuple(map_operands(renumbered, entry.args))
            kwargs = {name: map_operands(renumbered, a) for name, a in entry.kwargs.items()}
            counts = len(lifted[True]), len(lifted[False])
            last = Operation(last, entry.key, entry.plan, entry.metas, *counts, (args, kwargs))
        elif isinstance(entry, Input) and entry.first in read:
            last = Input(last, entry.meta)
        else:
            continue
        last.relocate(entry.where, entry.line)
        vids.update((entry.first + i, last.first + i) for i in range(len(entry.metas)))
    return last.path(), tuple(vids[v] for v in outputs)
