"""Reports of indices that were in range or not, which steps compute while ``XLA_CHECK_INDICES`` is on.

XLA has no errors: an index that is out of range reads or writes something, or nothing. With checking on, an
operator that takes indices also records their smallest and largest
(``dispatch.index_ranges``). They are results of the step like others, and are looked at here when it has run.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xla_core.recording.trace import Trace

MSG_INDEX: Final = "index {index} is out of bounds for dimension {dim} with size {size}"
MSG_ROW: Final = "index out of range in self"
MSG_TARGET: Final = "Target {index} is out of bounds."
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
        words = self.words.format(**facts)
        place = {"operator": self.operator, "file": self.file, "line": self.line}
        raise IndexOutOfRangeError(MSG_WHERE.format(words=words, **facts, **place))


pending: weakref.WeakKeyDictionary[Trace, list[tuple[Range, Any]]] = weakref.WeakKeyDictionary()
"""What was recorded on a device and not looked at: ranges, and tensors of the smallest and largest index."""


def add(trace: Trace, wanted: Range, extremes: Any) -> None:
    """Look at ``extremes``, the smallest and the largest index in a tensor, when the step of ``trace`` has run.

    ``wanted`` is the range that both must be in.
    """
    with trace.lock:
        pending.setdefault(trace, []).append((wanted, extremes))


def look(trace: Trace) -> None:
    """Raise IndexOutOfRangeError for the first operator of the step that has run whose indices are not in range.

    Waits for the step. The values that it computed are there, like those of any other.
    """
    recorded = pending.pop(trace, [])
    waiting = [check for check in recorded if trace.is_pending(check[1]._s)]
    if waiting:  # in other threads' steps
        pending[trace] = waiting
    for wanted, extremes in recorded:
        buffer = extremes._s.buffer
        if buffer is not None:  # None: its step could not be run
            smallest, largest = trace.backend.get(buffer).tolist()
            wanted.check(int(smallest), int(largest))
