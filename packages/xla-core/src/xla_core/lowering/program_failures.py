"""Errors of programs that cannot be compiled or run: which of them lose a step's values, and their messages.

When memory runs out, XLA only says RESOURCE_EXHAUSTED, sometimes not before a value is read long after the step.
``explained`` turns that error into a torch.OutOfMemoryError, which names the program's largest values, the
lines that compute them, and other values that are held.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from xla_core.jax_bridge import pjrt_c_api
from xla_core.lowering import held_values
from xla_core.recording.entry import Entry, operations_of
from xla_core.support.counters import render_bytes

MSG_OUT_OF_MEMORY: Final = (
    "{name} needs more memory than the device has: {error}\n"
    "Its largest values:\n{values}\n"
    "{held}"
    "What helps: a smaller batch (with gradients accumulated over several), bfloat16 (torch.autocast), "
    "torch_xla.utils.checkpoint.checkpoint() around layers, so that their activations are computed again; "
    "`del` of tensors that are not needed any more, or .detach() before they are kept."
)
MSG_VALUE: Final = "  {size} {meta}  {operator}{count}{place}"
MOST_VALUES: Final = 6
_KEPT: Final = 64
_MARK: Final = "xla_costs_step"
_REFUSED: Final = "xla_refused_program"


class Value(NamedTuple):
    """A value that a program computes: its size, and the line of the user's program that computes it."""

    nbytes: int
    meta: str
    operator: str
    place: str


def largest_values(entries: Iterable[Entry]) -> tuple[Value, ...]:
    """The largest values that ``entries`` compute, the largest first."""
    sizes = (
        (meta.nbytes, -operation.depth, operation, meta)
        for operation in operations_of(entries)
        for meta in operation.metas
        if meta is not None
    )
    largest = heapq.nlargest(_KEPT, sizes, key=lambda item: item[:2])
    return tuple(
        Value(size, str(meta), operation.plan.name, _place(operation))
        for size, _, operation, meta in largest
    )


def _place(entry: Entry) -> str:
    frames = entry.where.frames if entry.where is not None else ()
    if frames:
        return f" at {frames[0].filename}:{frames[0].line} in {frames[0].function}"
    if entry.line is not None:
        return f" at {entry.line[0]}:{entry.line[1]}"
    return " in the backward pass"


def place_of(entry: Entry | None) -> str:
    """The place where the user's program records ``entry``, as the end of a sentence."""
    return "" if entry is None else _place(entry)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is an out-of-memory error of a runtime or a compiler."""
    if isinstance(error, torch.OutOfMemoryError):  # already explained
        return False
    return isinstance(error, MemoryError) or pjrt_c_api.is_out_of_memory(error)


def explained(error: Exception, name: str, values: Sequence[Value]) -> Exception:
    """``error`` of the program ``name``, or a torch.OutOfMemoryError in its place if memory ran out.

    The latter says what takes the memory: ``values`` are the program's largest (see ``largest_values``).
    """
    if not is_out_of_memory(error):
        return error
    counts: dict[Value, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    lines = [
        MSG_VALUE.format(
            size=render_bytes(value.nbytes),
            meta=value.meta,
            operator=value.operator,
            count=f" ({count} times)" if count > 1 else "",
            place=value.place,
        )
        for value, count in list(counts.items())[:MOST_VALUES]
    ]
    held = held_values.text()
    text = MSG_OUT_OF_MEMORY.format(
        name=name, error=error, values="\n".join(lines), held=f"{held}\n" if held else ""
    )
    return torch.OutOfMemoryError(text)


def costing_step(error: Exception) -> Exception:
    """Mark ``error`` as one that loses the step's values: the step can be computed neither now nor later."""
    setattr(error, _MARK, True)
    return error


@contextlib.contextmanager
def costing(refused: bool = False) -> Iterator[None]:
    """A block whose exceptions (except Ctrl-C and the like) are marked by ``costing_step``.

    With ``refused``, they also say that the program cannot be made (see ``was_refused``).
    """
    try:
        yield
    except Exception as error:
        costing_step(error)
        if refused:
            setattr(error, _REFUSED, True)
        raise


def was_refused(error: Exception) -> bool:
    """Whether lowering or compiling a program failed for a reason other than memory."""
    return getattr(error, _REFUSED, False) and not isinstance(error, torch.OutOfMemoryError)


def costs_step(error: Exception) -> bool:
    """Whether ``costing_step`` has marked an error."""
    return getattr(error, _MARK, False)
