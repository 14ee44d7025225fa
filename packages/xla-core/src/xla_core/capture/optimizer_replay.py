"""The numbers of a replayed step that optimizers and schedulers change, and their step counts on the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.guards import END
from xla_core.capture.matching import check_numbers
from xla_core.capture.observation import Observation
from xla_core.capture.optimizer_probe import reader
from xla_core.capture.optimizer_steps import Counter, Window
from xla_core.capture.traced_numbers import Expression, Formulas, Source
from xla_core.contract.foreign_values import ForeignObject
from xla_core.torch_bridge.operands import Operand

_Group: TypeAlias = dict[str, Operand]
"""A group of an optimizer, or its state of a parameter."""
_Lookup: TypeAlias = Callable[[_Group], Operand]


class _CountVector:
    """Counts of steps of one dtype that share memory, so that one addition advances them all.

    ``is_current`` says whether they still do: another recording may have put some of them elsewhere.
    """

    _of_optimizers: Final = weakref.WeakKeyDictionary[torch.optim.Optimizer, "list[_CountVector]"]()

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._whole = torch.stack([t.detach() for t in tensors])
        for place, t in zip(self._whole.unbind(), tensors, strict=True):
            t.data = place
        self.numbers: np.ndarray = self._whole.numpy()
        # numpy takes twice the time to add a number of Python's
        self._one = np.ones((), self.numbers.dtype)
        self.is_current = True

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> _CountVector:
        """The vector of these counts of an optimizer, which all recordings of its steps share."""
        known = cls._of_optimizers.setdefault(optimizer, [])
        for one in known:
            if list(map(id, one._tensors)) == list(map(id, tensors)):
                return one
        wanted = set(map(id, tensors))
        for one in known:
            one.is_current = wanted.isdisjoint(map(id, one._tensors))
        vector = cls(tensors)
        known[:] = [*(one for one in known if one.is_current), vector]
        return vector

    def advance(self) -> None:
        """Add one to each."""
        self.numbers += self._one


class _Counts:
    """The counts of steps that an optimizer has for the parameters that a recorded step changes."""

    def __init__(self, optimizer: torch.optim.Optimizer, counters: list[Counter]) -> None:
        self._optimizer = optimizer
        self._tensors = [
            [c.tensor for c in counters if c.tensor.dtype == dtype]
            for dtype in dict.fromkeys(c.tensor.dtype for c in counters)
        ]
        self._bind()
        self._differences = [v.numbers - v.numbers[0] for v in self._vectors]

    def _bind(self) -> None:
        self._vectors = [_CountVector.of(self._optimizer, tensors) for tensors in self._tensors]
        self._contents = [vector.numbers.tobytes() for vector in self._vectors]

    def agree(self) -> bool:
        """Whether the counts differ from each other as they did: a formula reads one for many parameters."""
        for number, vector in enumerate(self._vectors):
            if not vector.is_current:
                self._bind()
                return self._differ_as_before()
            if vector.numbers.tobytes() != self._contents[number]:
                return self._differ_as_before()
        return True

    def _differ_as_before(self) -> bool:
        rows = zip(self._vectors, self._differences, strict=True)
        return all(np.array_equal(v.numbers - v.numbers[0], differences) for v, differences in rows)

    def present(self) -> list[bytes]:
        """All counts as they are now, for ``restore``."""
        return [vector.numbers.tobytes() for vector in self._vectors]

    def restore(self, contents: list[bytes]) -> None:
        """Set all counts to what they were."""
        self._contents[:] = contents
        for vector, content in zip(self._vectors, contents, strict=True):
            vector.numbers[:] = np.frombuffer(content, vector.numbers.dtype)

    def count(self) -> None:
        """Advance all counts by one step."""
        for number, vector in enumerate(self._vectors):
            vector.advance()
            self._contents[number] = vector.numbers.tobytes()


def _lookup(keys: Sequence[str]) -> _Lookup:
    """A function, in C where there are several keys, that gives a group's values of these."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda group: tuple(group[key] for key in keys)


class _Hyperparameters:
    """The values in an optimizer's groups that must not change; those that formulas read may change."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, window: Window) -> None:
        self._name = name
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        explanation = window.explanation
        read: set[Source] = set()
        if explanation is not None:
            read = {s for s in _read_sources(explanation.expressions) if s[0] == "group"}
            read -= explanation.constant
        self._kept: list[tuple[_Group, tuple[str, ...], _Lookup, Operand, list[Operand]]] = []
        for number, group in enumerate(self._groups):
            free = {s[2] for s in read if s[1] == number and len(s) == 3}
            keys = tuple(k for k in group if k not in free and k != "params" and k != "initial_lr")
            partly = {s[2] for s in read if s[1] == number and len(s) == 4}
            keys = tuple(k for k in keys if k not in partly)
            look = _lookup(keys)
            self._kept.append((group, keys, look, look(group), [*group["params"], *END]))
        nonzero = () if explanation is None else explanation.nonzero
        compared = [(reader(optimizer, s), s) for s in nonzero if s in read]
        self._signs = [(read, source, read() > 0) for read, source in compared]

    def check(self) -> None:
        """Raise CaptureError if a group, or a constant in one, has changed."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            self._refuse("param_groups", len(self._groups), len(groups))
        for now, (group, keys, look, values, kept) in zip(groups, self._kept, strict=True):
            parameters: Iterable[Operand] = itertools.chain(group["params"], END)
            if now is not group or any(map(operator.is_not, parameters, kept)):
                self._refuse("param_groups", "one list", "another one")
            if look(group) != values:
                for key, value in zip(keys, values, strict=True):
                    if group[key] != value:
                        self._refuse(key, value, group[key])
        for read, source, positive in self._signs:
            if not (value := read()) or (value > 0) is not positive:
                self._refuse(source[2], "positive" if positive else "negative", value)

    def _refuse(self, key: str, old: Operand, new: Operand) -> None:
        raise refuse(
            errors.MSG_HYPERPARAMETER, name=self._name, key=key,
            optimizer=type(self._optimizer).__name__, old=old, new=new,
        )  # fmt: skip


def _read_sources(expressions: dict[int, object]) -> set[Source]:
    sources: set[Source] = set()
    pending = list(expressions.values())
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if not isinstance(one, tuple) or id(one) in seen:
            continue
        seen.add(id(one))
        if one[0] == "source":
            sources.add(one[1])
        else:
            pending.extend(one[1:])
    return sources


class _Schedule:
    """What a scheduler that a recorded step steps holds, with schedulers inside it, and its optimizer's groups."""

    def __init__(self, scheduler: ForeignObject) -> None:
        schedulers = [scheduler]
        for one in schedulers:
            schedulers += getattr(one, "_schedulers", ())
        self._tables: list[_Group] = [one.__dict__ for one in schedulers]
        # numbers, and lists that each step makes anew: a schedule of a rate that is a tensor is refused
        self._tables += scheduler.optimizer.param_groups

    def present(self) -> list[_Group]:
        """All of it as it is now, for ``restore``."""
        return [table.copy() for table in self._tables]

    def restore(self, contents: list[_Group]) -> None:
        """Make it what it was."""
        for table, content in zip(self._tables, contents, strict=True):
            table.update(content)


class Numbers:
    """The lifted floats of a recorded step; ``known`` are the positions of those that may change.

    ``fixed`` says that none does. ``optimizers`` are those that the step lets take theirs, and ``parameters`` the
    ids of the parameters that these change.
    """

    def __init__(self, name: str, former: Observation, latter: Observation) -> None:
        self._name = name
        self._floats = np.array(latter.floats, np.float64)
        self.known: set[int] = set()
        self._work: list[Callable[[], None]] = []
        self._checks: list[_Hyperparameters] = []
        self._counts: list[tuple[_Counts, str]] = []
        self._advanced: list[_Counts | _Schedule] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._expressions: list[dict[int, Expression]] = []
        self._recorded = dataclasses.replace(
            latter,
            inputs=[],
            values=[],
            gradients=[],
            arguments=[],
            leaves=[],
            windows=[],
            events=[],
        )
        if len(former.windows) != len(latter.windows):
            raise refuse(errors.MSG_OPTIMIZER_STEPS, name=name)
        self.fixed = True
        self.parameters = {
            id(p) for w in latter.windows for g in w.optimizer.param_groups for p in g["params"]
        }
        windows = list(zip(former.windows, latter.windows, strict=True))
        for kind, what in latter.events:
            if kind == "schedule":
                self._add_schedule(*what)
            else:
                before, window = windows[what]
                self._add_window(before, window, former, latter)

    def _add_schedule(self, scheduler: ForeignObject, has_argument: bool) -> None:
        if has_argument:
            raise refuse(errors.MSG_SCHEDULE, name=self._name, scheduler=type(scheduler).__name__)
        self._work.append(scheduler.step)
        self._advanced.append(_Schedule(scheduler))

    def _add_window(
        self, before: Window, window: Window, former: Observation, latter: Observation
    ) -> None:
        optimizer, explanation = window.optimizer, window.explanation
        kind = type(optimizer).__name__
        if window.changed is not None:
            why = "only numbers that count steps are advanced"
            raise refuse(
                errors.MSG_OPTIMIZER, name=self._name, optimizer=kind, what=window.changed, why=why
            )
        self._checks.append(_Hyperparameters(self._name, optimizer, window))
        self.optimizers.append(optimizer)
        if window.counters:
            counts = _Counts(optimizer, window.counters)
            self._counts.append((counts, kind))
            self._advanced.append(counts)
            self._work.append(counts.count)
        self._expressions.append({} if explanation is None else explanation.expressions)
        if explanation is None:
            olds = former.floats[before.first : before.last]
            news = latter.floats[window.first : window.last]
            if list(map(repr, olds)) != list(map(repr, news)):
                raise refuse(
                    errors.MSG_OPTIMIZER,
                    name=self._name,
                    optimizer=kind,
                    what="numbers",
                    why=window.why,
                )
            return
        formulas = Formulas(
            latter.floats[window.first : window.last],
            explanation.expressions,
            lambda source: reader(optimizer, source),
        )
        self.known.update(window.first + i for i in explanation.expressions)
        if not formulas.fixed:
            self.fixed = False
            target = self._floats[window.first : window.last]
            self._work.append(functools.partial(formulas.store, target))

    def compare(self, seen: Observation) -> None:
        """Raise CaptureError if another call's numbers differ from those of a replay."""
        known: set[int] = set()
        for window, expressions in zip(seen.windows, self._expressions, strict=False):
            explanation = window.explanation
            if (explanation.expressions if explanation is not None else {}) != expressions:
                raise refuse(errors.MSG_CHECK, name=self._name, why="an optimizer's numbers")
            known.update(window.first + i for i in expressions)
        if len(seen.windows) != len(self._expressions):
            raise refuse(errors.MSG_OPTIMIZER_STEPS, name=self._name)
        check_numbers(self._name, self._recorded, seen, known, set(seen.drawn.positions))

    def check(self) -> None:
        """Raise CaptureError if constants or counts of an optimizer have changed."""
        for one in self._checks:
            one.check()
        for counts, kind in self._counts:
            if not counts.agree():
                raise refuse(errors.MSG_COUNTS, name=self._name, optimizer=kind)

    def present(self) -> list[ForeignObject]:
        """The optimizers' counts of steps, and the schedules, as they are now, for ``restore``."""
        return [one.present() for one in self._advanced]

    def restore(self, contents: list[ForeignObject]) -> None:
        """Set counts and schedules to what they were before a step that has not been launched."""
        for one, content in zip(self._advanced, contents, strict=True):
            one.restore(content)

    @property
    def last(self) -> np.ndarray:
        """The floats of the last step."""
        return self._floats

    def advance(self) -> np.ndarray:
        """Advance schedulers and counts in the recorded order, and return the floats of this step."""
        for work in self._work:
            work()
        return self._floats if self.fixed else self._floats.copy()
