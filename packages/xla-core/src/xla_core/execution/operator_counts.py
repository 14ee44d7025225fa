"""Counts the operators that are called, under torch_xla's names (``xla::add``).

torch_xla counts an operator when it is called. Here calls are not counted one by one, because the path of the step
already contains them: they are counted when the step ends, or when the counters are read during the step.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Final

from xla_core.operators.plan import Plan
from xla_core.recording.entry import Entry, operations_of
from xla_core.recording.trace import Trace
from xla_core.support import caches, counters

# torch_xla's names of operators that PyTorch has split up since.
_NAMES: Final = {
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
}
# torch_xla's own in-place operators keep their names; those of PyTorch are counted in their functional form.
_ATEN: Final = "aten"

# A reader of the counters waits at most this long (in seconds) for a device that is compiling.
_PATIENCE: Final = 0.1

# The class of a trace's lock, unless the body of a computation is being recorded.
_STEP_LOCK: Final = type(threading.RLock())

# The number of entries of a step that are already counted, by epoch: only for steps whose counters were read.
_counted: caches.Bounded[int, int] = caches.Bounded("steps counted in part")


def counter_name(plan: Plan) -> str:
    """The counter of an operator: ``xla::add`` for both ``aten::add`` and ``aten::add_``."""
    namespace, _, name = str(plan.overload._schema.name).partition("::")
    if namespace == _ATEN and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return "xla::" + _NAMES.get(name, name)


def _rows(entries: Iterable[Entry]) -> tuple[tuple[str, int], ...]:
    """The counts of the operators in ``entries``, and of the tensors that they make, by the counters' names."""
    counts: Counter[str] = Counter()
    for operation in operations_of(entries):
        counts[counter_name(operation.plan)] += 1
        counts[counters.CREATED] += len(operation.metas)
    return tuple(counts.items())


def step_ended(epoch: int, last: Entry) -> None:
    """Count the rest of the step of ``epoch``, whose last entry is ``last``."""
    done = _counted.pop(epoch, 0) if _counted else 0
    if done:
        _count(last.path()[done:])
        return
    tally = last.tally
    if tally is None:
        tally = counters.Tally(_rows(last.path()))
        last.keep_tally(tally)
    tally.count()


def _count(entries: Iterable[Entry]) -> None:
    for name, by in _rows(entries):
        counters.increment(name, by)


def count_pending(traces: Iterable[Trace]) -> None:
    """Count the pending operators of all threads on these devices.

    The body of a computation is one operator: while one is recorded, nothing is counted.
    """
    for trace in traces:
        lock = (
            trace.bare
        )  # read once: the recorder of a body may put its own lock there at any time
        if isinstance(lock, _STEP_LOCK) and lock.acquire(timeout=_PATIENCE):
            try:
                _count_steps(trace)
            finally:
                lock.release()


def _count_steps(trace: Trace) -> None:
    steps = [(trace.epoch, trace.cur)]
    steps += [(epoch, step.last) for epoch, step in trace.parked.items()]
    for epoch, last in steps:
        done = _counted.get(epoch, 0)
        if last.depth > done:
            _counted.keep(epoch, last.depth)
            _count(last.path()[done:])
