"""Checks of indices that steps compute, while ``XLA_CHECK_INDICES=1``.

XLA programs cannot raise errors: an index that is out of range reads or writes something, or nothing. An operator
checks indices with known values when it is called (``dispatch.index_ranges``). With ``XLA_CHECK_INDICES=1`` it also
records the smallest and the largest value of other indices. These are ordinary results of the step, and are checked
here after it has run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from xla_core.recording.trace import Trace
    from xla_core.recording.xla_tensor import XLATensor

MSG_INDEX: Final = "index {index} is out of bounds for dimension {dim} with size {size}"
MSG_ROW: Final = "index out of range in self"
MSG_TARGET: Final = "Target {index} is out of bounds."
MSG_MARGIN: Final = "target out of range"
MSG_CLASS: Final = "Class values must be smaller than num_classes."
MSG_NEGATIVE_CLASS: Final = "Class values must be non-negative."
MSG_WHERE: Final = (
    "{words} ({operator}, called at {file}:{line}, was given index {index} "
    "for dimension {dim} of size {size})"
)


class IndexOutOfRangeError(IndexError, RuntimeError):
    """An index that is out of range: what PyTorch raises on the CPU is one or the other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The indices that one operator takes for one dimension: those from ``low`` to below ``size``."""

    operator: str
    words: str
    dim: int
    low: int
    size: int
    file: str
    line: int

    def check(self, smallest: int, largest: int) -> None:
        """Raise IndexOutOfRangeError unless both are in the range."""
        if smallest >= self.low and largest < self.size:
            return
        index = smallest if smallest < self.low else largest
        facts = {"index": index, "dim": self.dim, "size": self.size}
        negative = self.words is MSG_CLASS and index < 0
        words = MSG_NEGATIVE_CLASS if negative else self.words.format(**facts)
        place = {"operator": self.operator, "file": self.file, "line": self.line}
        raise IndexOutOfRangeError(MSG_WHERE.format(words=words, **facts, **place))


pending: weakref.WeakKeyDictionary[Trace, list[tuple[Range, XLATensor]]] = (
    weakref.WeakKeyDictionary()
)
"""Checks that were recorded on a device and not made yet: ranges, and tensors of smallest and largest indices."""


class _Bodies(threading.local):
    """The checks in the functions whose bodies this thread is recording, the innermost function last."""

    def __init__(self) -> None:
        self.ranges: list[list[tuple[Range, XLATensor]]] = []


_bodies = _Bodies()


@contextlib.contextmanager
def of_body() -> Iterator[list[tuple[Range, XLATensor]]]:
    """The list of the checks that ``add`` receives inside the block, for a function whose body is recorded.

    Values of such a function exist only while it runs: its recorder returns them as results of the function, and
    adds the results that the step receives.
    """
    ranges: list[tuple[Range, XLATensor]] = []
    _bodies.ranges.append(ranges)
    try:
        yield ranges
    finally:
        _bodies.ranges.pop()


def are_wanted(trace: Trace) -> bool:
    """Whether the step being recorded can be checked; a graph that is recorded for any values cannot."""
    return bool(_bodies.ranges) if trace.body_recorder is not None else trace.unreadable is None


def add(trace: Trace, wanted: Range, extremes: XLATensor) -> None:
    """Check ``extremes``, pairs of the smallest and largest index, when the step of ``trace`` has run.

    The pairs are along the last dimension; ``wanted`` is the range that the indices must be in.
    """
    if trace.body_recorder is not None:
        _bodies.ranges[-1].append((wanted, extremes))
        return
    with trace.lock:
        pending.setdefault(trace, []).append((wanted, extremes))


def look(trace: Trace) -> None:
    """Raise IndexOutOfRangeError for the first operator of the step whose indices were out of range.

    Waits for the step. The values that it computed remain available.
    """
    recorded = pending.pop(trace, [])
    waiting = [check for check in recorded if trace.is_pending(check[1]._s)]
    if waiting:  # in other threads' steps
        pending[trace] = waiting
    for wanted, extremes in recorded:
        buffer = extremes._s.buffer
        if buffer is not None:  # None if its step could not be run
            pairs = trace.backend.get(buffer).reshape(-1, 2)
            if len(pairs):  # a loop may have run no iteration
                wanted.check(int(pairs[:, 0].min()), int(pairs[:, 1].max()))
