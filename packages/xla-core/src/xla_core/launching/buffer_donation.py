"""Values that the user gives away: the next program that reads one may reuse its memory for a result.

``run_step`` always donates the memory of values that a step overwrites. This module is for values that a step only
reads and that are not needed afterwards. A mark belongs to the buffer, and disappears with it. As in torch_xla,
marks apply where a step ends (``torch_xla.sync()``) and in compiled functions. Where a step is only cut because a
value is read, they apply only inside ``alias_with_buffer_donor_config``.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from xla_core.contract.device_protocol import Buffer
from xla_core.recording.storage import NoValueError, PoisonedValue, Storage, poisoning
from xla_core.recording.trace import Trace

MSG_DONATED: Final = (
    "this tensor's value was donated: it was marked with _set_buffer_donation, and a program has "
    "reused its memory"
)


class GivenAwayError(NoValueError):
    """The value was given away, and a program has reused its memory."""


Pairs = tuple[tuple[int, int], ...]
"""Pairs of the slot of a program's input and the number of the value that reuses its memory."""


class _Config:
    alias = False


_marked: dict[int, weakref.ref[object]] = {}


@contextlib.contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[bool]:
    """A block in which marks of ``_set_buffer_donation`` apply to every program, or (False) only where steps end.

    Yields the former setting, which is initially False. ``should_alias`` is True by default.
    """
    former = _Config.alias
    _Config.alias = should_alias
    try:
        yield former
    finally:
        _Config.alias = former


def set_aliasing(should_alias: bool) -> None:
    """From now on, apply marks to every program, or (False) only where steps end."""
    _Config.alias = bool(should_alias)


def aliasing() -> bool:
    """Whether marks apply to every program."""
    return _Config.alias


def any_may_count() -> bool:
    """Whether the next program may reuse the memory of a marked value."""
    return _Config.alias or bool(_marked)


def mark(s: Storage, donated: bool) -> bool:
    """Mark the storage's value, or remove the mark; returns False for a value that is not in device memory yet.

    While a graph is only being recorded, the trace notes the mark by the storage's id, and no buffer is marked.
    """
    noted = s.trace.noted_marks
    if noted is not None:
        noted[id(s)] = donated
        return True
    buffer = s.buffer
    if buffer is None:
        return False
    number = id(buffer)
    if not donated:
        _marked.pop(number, None)
    else:
        _marked[number] = weakref.ref(buffer, lambda _: _marked.pop(number, None))
    return True


def is_marked(buffer: Buffer) -> bool:
    """Whether a buffer is marked."""
    mark = _marked.get(id(buffer))
    return mark is not None and mark() is buffer


def pairs(trace: Trace, alive: Sequence[Storage], taken: Pairs, ending: bool) -> Pairs:
    """Pairs of marked inputs and results with the same shape and dtype, except those in ``taken``.

    ``alive`` are the storages that will receive the results of the step of ``trace``; ``ending`` says that
    the user ends the step here.
    """
    if not _marked or not (_Config.alias or ending):
        return ()
    slots, results = {slot for slot, _ in taken}, {vid for _, vid in taken}
    free = {s.vid: s.meta for s in alive if s.vid not in results}
    marked = []
    for slot, buffer in enumerate(trace.inputs):
        if slot in slots or not is_marked(buffer):
            continue
        meta = trace.touched[trace.input_storages[slot]].meta
        vid = next((v for v, m in free.items() if m is meta), None)
        if vid is not None:
            del free[vid]
            marked.append((slot, vid))
    return tuple(marked)


def is_gone(s: Storage) -> bool:
    """Whether a storage has lost its value because a program has reused its memory."""
    return isinstance(s.vid, PoisonedValue) and isinstance(s.vid.error, GivenAwayError)


def holders(trace: Trace, given: Pairs) -> dict[int, Storage]:
    """The storages, by input slot, whose values are about to be donated."""
    storages = {slot: trace.touched[trace.input_storages[slot]] for slot, _ in given}
    return {slot: s for slot, s in storages.items() if s.buffer is trace.inputs[slot]}


def releasing(held: Iterable[Storage]) -> Iterator[None]:
    """For ``indivisible.do``: take away the values of these storages, which were donated."""
    error = GivenAwayError(MSG_DONATED)
    return itertools.chain.from_iterable([poisoning(s, error) for s in held])
