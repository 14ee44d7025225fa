"""Counts the operators that are called, under torch_xla's names (``xla::add``).

torch_xla counts an operator when it is called. Here nothing is counted then: what a step has recorded is in its
path already. It is counted when the step ends, and when somebody looks at the counters in the middle of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from xla_core.operators.plan import Plan
from xla_core.recording.entry import Entry, operations_of
from xla_core.recording.trace import Trace
from xla_core.support import caches, counters

# What an operator is called in torch_xla where PyTorch split it up further.
_NAMES: Final = {
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
}
# torch_xla's own operators that write keep their names; PyTorch's are made functional before they are counted.
_ATEN: Final = "aten"

# A reader of the counters does not wait longer than this for a device that compiles.
_PATIENCE: Final = 0.1

# How much of a step is counted, by the step's epoch: only of those that somebody looked at.
_counted: caches.Bounded[int, int] = caches.Bounded("steps counted in part")


def counter_name(plan: Plan) -> str:
    """The counter of an operator: ``xla::add`` for ``aten::add_``, too."""
    namespace, _, name = str(plan.overload._schema.name).partition("::")
    if namespace == _ATEN and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return "xla::" + _NAMES.get(name, name)


def _rows(entries: Iterable[Entry]) -> tuple[tuple[str, int], ...]:
    """The operators of ``entries``, and the tensors that they make, by their counters' names."""
    counts: Counter[str] = Counter()
    for operation in operations_of(entries):
        counts[counter_name(operation.plan)] += 1
        counts[counters.CREATED] += len(operation.metas)
    return tuple(counts.items())


def step_ended(epoch: int, last: Entry) -> None:
    """Count the step of ``epoch``, which ``last`` ended: what of it is not counted yet."""
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
    """Count what was recorded on these devices, by all threads, and did not run yet."""
    for trace in traces:
        if trace.bare.acquire(timeout=_PATIENCE):
            try:
                _count_steps(trace)
            finally:
                trace.bare.release()


def _count_steps(trace: Trace) -> None:
    if trace.aside is not None:
        return  # the body of a computation, which is one operator
    steps = [(trace.epoch, trace.cur)]
    steps += [(epoch, step.last) for epoch, step in trace.parked.items()]
    for epoch, last in steps:
        done = _counted.get(epoch, 0)
        if last.depth > done:
            _counted.keep(epoch, last.depth)
            _count(last.path()[done:])
