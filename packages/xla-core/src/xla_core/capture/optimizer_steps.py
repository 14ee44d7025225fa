"""Records the steps of optimizers and schedulers inside a captured step, and the origin of their numbers.

While a step is recorded, torch's global optimizer hooks report when an optimizer takes its step, a ``Window`` of
the recorded step. ``optimizer_probe`` finds out which of its lifted numbers come from learning rates and step
counts.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_core.capture.optimizer_probe import Explanation, explain
from xla_core.contract.foreign_values import ForeignObject
from xla_core.recording.entry import Entry
from xla_core.recording.trace import Trace
from xla_core.torch_bridge.operands import Operand, Tree

# The steps of optimizers in these packages only change the optimizer, its parameters and their gradients.
_KNOWN_PACKAGES = ("torch.optim", "torch_xla", "xla_core")


@dataclasses.dataclass(slots=True)
class Counter:
    """A step count of an optimizer on the host, ``state[key]`` in the state of a parameter."""

    state: dict[str, object]
    key: str
    tensor: torch.Tensor


@dataclasses.dataclass(slots=True)
class Window:
    """One step of an optimizer, whose lifted floats are those from ``first`` to ``last``.

    ``counters`` have advanced by one; ``changed`` names other state on the host that has changed, or is None.
    ``explanation`` says how the floats are computed; if it is None, ``why`` is the reason.
    """

    optimizer: torch.optim.Optimizer
    first: int
    last: int
    counters: list[Counter]
    changed: str | None
    explanation: Explanation | None
    why: str


class OptimizerSteps:
    """Watches the steps of optimizers and schedulers while a step is recorded."""

    def __init__(self, trace: Trace) -> None:
        self.windows: list[Window] = []
        self.events: list[tuple[str, ForeignObject]] = []
        self._trace = trace
        self._open: list[
            tuple[torch.optim.Optimizer, int, Entry, dict[tuple[int, str], object]]
        ] = []
        self._nested = False

    @contextmanager
    def watching(self, schedulers: Sequence[ForeignObject]) -> Iterator[None]:
        """A block in which the steps of optimizers, and those of ``schedulers``, are noted."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin).remove)
            stack.callback(register_optimizer_step_post_hook(self._end).remove)
            for scheduler in schedulers:
                scheduler.step = self._noting(scheduler, scheduler.step)
                stack.callback(scheduler.__dict__.pop, "step", None)
            yield

    def _noting(self, scheduler: object, step: Callable[..., object]) -> Callable[..., object]:
        reference = weakref.ref(scheduler)

        def noted(*args: Operand, **kwargs: Tree) -> object:
            self.events.append(("schedule", (reference(), bool(args or kwargs))))
            return step(*args, **kwargs)

        return noted

    def _begin(self, optimizer: torch.optim.Optimizer, _args: Operand, _kwargs: object) -> None:
        trace = self._trace
        with trace.lock:
            self._open.append((optimizer, len(trace.floats), trace.cur, host_state(optimizer)))
        self._nested = False

    def _end(self, optimizer: torch.optim.Optimizer, args: Operand, kwargs: Tree) -> None:
        if not self._open or self._open[-1][0] is not optimizer:
            return
        _, first, entry, before = self._open.pop()
        if self._nested:  # an optimizer around another one: the inner one's step was noted
            return
        self._nested = True
        trace = self._trace
        counters, changed = _changes(optimizer, before)
        with trace.lock:
            floats = trace.floats[first:]
            entries = _between(entry, trace.cur)
        explanation: Explanation | None = None
        why = f"{type(optimizer).__name__} is not one of torch's"
        if _is_known(type(optimizer)):
            given = tuple(a for a in args if a is not optimizer)
            outcome = explain(optimizer, (given, kwargs), trace, floats, entries)
            if isinstance(outcome, Explanation):
                explanation, why = outcome, ""
            else:
                why = outcome
        last = first + len(floats)
        self.events.append(("optimizer", len(self.windows)))
        self.windows.append(Window(optimizer, first, last, counters, changed, explanation, why))


def _is_known(kind: type) -> bool:
    return all(
        base.__module__.startswith(_KNOWN_PACKAGES) for base in kind.__mro__ if base is not object
    )


def _between(first: Entry, last: Entry) -> list[Entry]:
    path: list[Entry] = []
    entry: Entry | None = last
    while entry is not None and entry is not first:
        path.append(entry)
        entry = entry.parent
    path.reverse()
    return path


def host_state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], object]:
    """The numbers that an optimizer keeps on the host, by the parameter's id and their name.

    Those in its groups are there by -1 for the first group, -2 for the second and so on.
    """
    values: dict[tuple[int, str], object] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            parts = value if isinstance(value, tuple) else (value,)
            if all(isinstance(part, (int, float)) for part in parts):
                values[-1 - number, key] = value
    for p, state in optimizer.state.items():
        if not isinstance(state, dict):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                values[id(p), key] = value.tolist()
            elif isinstance(value, (int, float)):
                values[id(p), key] = value
    return values


def _changes(
    optimizer: torch.optim.Optimizer, before: Mapping[tuple[int, str], Operand]
) -> tuple[list[Counter], str | None]:
    """The counts that have advanced by one, and the name of another number that has changed or is new."""
    counters = []
    after = host_state(optimizer)
    of_groups = (place for place in after if place[0] < 0)
    changed = next((f"{p[1]!r}" for p in of_groups if repr(before.get(p)) != repr(after[p])), None)
    for p, state in optimizer.state.items():
        if not isinstance(state, dict):
            continue
        for key, value in state.items():
            was, now = before.get((id(p), key)), after.get((id(p), key))
            if (was == now and (id(p), key) in before) or now is None:
                continue
            is_count = isinstance(value, torch.Tensor) and value.dim() == 0
            if is_count and was is not None and now == was + 1:
                counters.append(Counter(state, key, value))
                continue
            changed = f"{key!r}"
    return counters, changed
