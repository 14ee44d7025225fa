"""Who else refers to what a replay changes: counts of references, and the gradients, which get new tensors then.

What nobody looks at between two replays is passed on from one to the other (``Lending``).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from sys import getrefcount
from typing import Final

import torch

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.guards import Guards
from xla_core.capture.matching import Wiring, numbers_of
from xla_core.capture.observation import CLEARED, Observation
from xla_core.recording.storage import HeldBuffer, Loan, Storage
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Replacements, XLATensor
from xla_core.support.indivisible import storing_each
from xla_core.torch_bridge.operands import Operand
from xla_core.torch_bridge.torch_private import without_torch_function

_BUFFER: Final = operator.attrgetter("buffer")
_GRAD: Final = operator.attrgetter("grad")
_STORAGE: Final = operator.attrgetter("_s")
_KIND: Final = operator.attrgetter("_v", "_s.trace", "_s.meta")
_NONES: Final = itertools.repeat(None)


class Constant:
    """Takes the place of a storage, with a constant of the recording as its buffer."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: HeldBuffer) -> None:
        self.buffer = buffer


def _counts() -> tuple[int, int, int]:
    """The reference counts that ``map(getrefcount, ...)`` gives for objects without other references.

    They are those of an object in one list, of a buffer in a storage and a list, and of a gradient in its parameter
    and a list.
    """
    (alone,) = map(getrefcount, [Constant(None)])
    owner = [Constant(object())]
    held = list(map(_BUFFER, owner))
    (owned,) = map(getrefcount, map(held.__getitem__, (0,)))
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    gradients = [parameter.grad]
    (gradient,) = map(getrefcount, gradients)
    return alone, owned, gradient


ALONE, _OWNED, _GRADIENT = _counts()
# A gradient, and its storage, which is in the gradient and among the targets; both are in one more list.
_HELD_GRADIENT: Final = _GRADIENT + 1
_OF_GRADIENT: Final = ALONE + 2
PICKED: Final = _OWNED + 1
"""The reference count of a buffer that is in a storage, in a list and among what was picked from it."""


def picker(places: Sequence[int]) -> Callable[[Sequence[Operand]], Sequence[Operand]]:
    """A function, in C, that gives the items of a sequence at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first, end = (places[0], places[0] + 1) if places else (0, 0)
    return operator.itemgetter(slice(first, end))


class Gradients:
    """The gradients that a step fills (``tensors`` of the parameters ``owners``), and those that it must find.

    ``entering`` are parameters whose gradients the step takes as it finds them, ``cleared`` those that it leaves
    without one. ``looked_at`` are the ids of parameters whose gradients the step looks at otherwise, and of
    storages of such gradients.
    """

    def __init__(self, name: str, wiring: Wiring, guards: Guards, looked_at: Set[int]) -> None:
        self._name = name
        self.owners = [one.parameter for one in wiring.gradients]
        self.tensors = [one.grad for one in wiring.gradients]
        # the tensors and then their storages; filled when it is needed
        self._held: list[Operand] = []
        count = len(self.owners)
        self._unshared = [_HELD_GRADIENT] * count + [_OF_GRADIENT] * count
        self.entering = [one.parameter for one in wiring.entering]
        self._kinds = [(one.was._v, one.was._s.trace, one.was._s.meta) for one in wiring.entering]
        self._layouts = tuple(one.layout for one in wiring.entering)
        self.cleared = list(wiring.cleared)
        self._replacements = Replacements.count
        self._bind_others(wiring, guards, looked_at)

    def _bind_others(self, wiring: Wiring, guards: Guards, looked_at: Set[int]) -> None:
        """Note which parameters must have a gradient, which must have none, and which the one of now."""
        self._absent = [one.parameter for one in wiring.gradients if one.none]
        self._present = list(self.entering)
        self._others: list[Operand] = []
        self._of_others: list[Operand] = []
        filled, entering, cleared = (
            set(map(id, some)) for some in (self.owners, self.entering, self.cleared)
        )
        for p in guards.parameters():
            was = wiring.present.get(id(p))
            is_read = guards.names_gradients or id(p) in looked_at
            if id(p) in entering:
                continue
            if id(_storage(was)) in looked_at:
                self._others.append(p)
                self._of_others.append(was)
            elif id(p) in filled:
                continue
            elif was is None:
                if is_read or guards.clears_gradients:
                    self._absent.append(p)
            elif guards.names_gradients or (is_read and id(p) not in cleared):
                self._present.append(p)
        self._storages_of_others = list(map(_storage, self._of_others))
        self._seen = Replacements.count

    def check(self) -> None:
        """Raise CaptureError if a gradient is not one that the step expects."""
        if not (self._absent or self._present or self._others):
            return
        # torch would look for a __torch_function__ of their class in every access: half of its time
        with without_torch_function():
            differ = any(map(operator.is_not, map(_GRAD, self._absent), _NONES)) or any(
                map(operator.is_, map(_GRAD, self._present), _NONES)
            )
            replaced = any(map(operator.is_not, map(_GRAD, self._others), self._of_others))
        if differ:
            raise errors.OtherGradientsError(self._name, [*self._absent, *self._present])
        if self._others and (replaced or Replacements.count != self._seen):
            self._check_others()

    def _check_others(self) -> None:
        expected = zip(self._others, self._of_others, self._storages_of_others, strict=True)
        for p, grad, storage in expected:
            if p.grad is not grad or _storage(grad) is not storage:
                what = f"the gradient of a parameter of {tuple(p.shape)}"
                raise refuse(errors.MSG_REPLACED, name=self._name, what=what)
        self._seen = Replacements.count

    def entered(self, trace: Trace) -> list[XLATensor]:
        """The present gradients of ``entering``. Raises CaptureError for one of another kind than was recorded."""
        with without_torch_function():
            grads = list(map(_GRAD, self.entering))
        if set(map(type, grads)) != {XLATensor} or list(map(_KIND, grads)) != self._kinds:
            self._refuse_kind(grads)
        if any(self._layouts):
            layouts = (trace.backend.argument_layouts([g._s]) for g in grads)
            if tuple(layouts) != self._layouts:
                self._refuse_kind(grads)
        return grads

    def _refuse_kind(self, grads: Sequence[Operand]) -> None:
        """Raise the error for the first gradient of another kind, else for the first in another layout."""
        rows = list(zip(self.entering, grads, self._kinds, strict=True))
        others = (row for row in rows if type(row[1]) is not XLATensor or _KIND(row[1]) != row[2])
        p, _, (_, _, meta) = next(others, rows[0])
        shape = tuple(p.shape)
        raise refuse(errors.MSG_GRADIENT_KIND, name=self._name, shape=shape, expected=meta)

    def are_left_as(self, seen: Observation) -> bool:
        """Whether a call left the same parameters without a gradient as the step does."""
        known = set(map(id, self.cleared))
        left = {id(g.parameter) for g in seen.gradients if g.change == CLEARED}
        return left <= known and all(p.grad is None for p in self.cleared)

    def clearing(self) -> Iterator[None]:
        """For ``indivisible.do``: leave ``cleared`` without gradients."""
        return storing_each("grad", self.cleared, _NONES)

    def use(self, tensors: Sequence[Operand]) -> None:
        """Use other tensors, which the parameters have as their gradients."""
        self.tensors[:] = tensors
        self._held = []

    def are_unshared(self, targets: Sequence[Storage]) -> bool:
        """Whether the parameters have these gradients, and nothing else refers to them or to their storages.

        Their storages are the last of ``targets``.
        """
        if Replacements.count != self._replacements:
            return False
        with without_torch_function():
            if any(map(operator.is_not, map(_GRAD, self.owners), self.tensors)):
                return False
        if not self._held:
            self._held = [*self.tensors, *targets[len(targets) - len(self.tensors) :]]
        return list(map(getrefcount, self._held)) == self._unshared

    def renewed(
        self, trace: Trace, targets: Sequence[Storage], first: int
    ) -> Iterator[tuple[int, Storage]]:
        """Use new tensors for gradients that others refer to, or that have another storage (``grad.data = ...``).

        Gives their numbers and new storages; the gradients' are the ``targets`` from ``first`` on.
        """
        tensors = self.tensors
        self._replacements = Replacements.count
        self._held = []
        attached = list(map(operator.is_, map(_GRAD, self.owners), tensors))
        counts = list(map(getrefcount, tensors))
        of_storages = list(map(getrefcount, map(_STORAGE, tensors)))
        for i, is_attached in enumerate(attached):
            target = targets[first + i]
            own = _GRADIENT if is_attached else ALONE
            alone = counts[i] <= own and of_storages[i] <= _OWNED
            if not alone or tensors[i]._s is not target:
                tensors[i] = fresh = trace.from_buffer(None, target.meta)
                yield i, fresh._s
            elif not is_attached:
                # nobody can see the former value: its memory is free before the launch
                target.relocate(None)

    def attaching(self) -> Iterator[None]:
        """For ``indivisible.do``: set the parameters' gradients to those of the step."""
        return storing_each("grad", self.owners, self.tensors)


# A loan costs a little more to begin and to recall than one ordinary run, so it comes after so many of these, and
# after twice as many each time that it has not lasted.
_RUNS_BEFORE_LENDING: Final = 2
_MOST_RUNS_BEFORE_LENDING: Final = 256
_LASTING_RUNS: Final = 8


class Lending:
    """Passes what a step reads and writes on to its next run, until someone looks at one of these tensors.

    ``targets`` are the storages that the step writes, ``inputs`` those that it reads, ``arguments`` the slots of
    inputs that are arguments, with the arguments' numbers. Their owner, which may change the lists, holds the
    trace's lock in each call, and says whether the program and the call allow it.
    """

    def __init__(
        self,
        trace: Trace,
        targets: Sequence[Storage],
        inputs: Sequence[Storage | Constant],
        arguments: Sequence[tuple[int, int]],
    ) -> None:
        self._trace = trace
        self._targets = targets
        self._inputs = inputs
        self._arguments = arguments
        self._loan = Loan()
        self._began = False
        self._lasted = 0
        self._wait = self._left = _RUNS_BEFORE_LENDING
        self._constants: list[HeldBuffer] = []
        self._numbers: list[int] = []
        self._arrange = picker(())

    @property
    def active(self) -> bool:
        """Whether nobody has looked at the tensors since the last run."""
        return self._loan.active

    def inputs(
        self, arguments: Sequence[XLATensor], ready: Callable[[Storage], HeldBuffer]
    ) -> list[HeldBuffer]:
        """The buffers of the program's inputs, in its order; ``ready`` gives those of arguments."""
        loan = self._loan
        buffers = [ready(arguments[number]._s) for number in self._numbers]
        return list(self._arrange((*loan.written, *loan.read, *self._constants, *buffers)))

    def storing(self, results: Iterable[Sequence[HeldBuffer]]) -> Iterator[None]:
        """For ``indivisible.do``: keep the ``results`` for the next run (one sequence, taken at that time)."""
        self._lasted += 1
        return self._loan.renewing(results)

    def _is_too_early(self) -> bool:
        if self._began:  # a loan that has been recalled
            short = self._lasted < _LASTING_RUNS
            longer = min(2 * self._wait, _MOST_RUNS_BEFORE_LENDING)
            self._wait = self._left = longer if short else _RUNS_BEFORE_LENDING
            self._began = False
        self._left -= 1
        return self._left >= 0

    def beginning(
        self, buffers: Sequence[HeldBuffer], results: Iterable[Sequence[HeldBuffer]]
    ) -> Iterator[None] | None:
        """The work, for ``indivisible.do``, that begins to keep ``results``; None if it is too early or impossible.

        ``buffers`` are those of the inputs.
        """
        if self._is_too_early():
            return None
        targets, inputs, numbers = self._targets, self._inputs, dict(self._arguments)
        written = set(map(id, targets))
        of_tensors = [slot for slot in range(len(inputs)) if slot not in numbers]
        others = [slot for slot in of_tensors if id(inputs[slot]) not in written]
        if any(inputs[slot].buffer is not buffers[slot] for slot in of_tensors):
            return None  # values that only stand for buffers, or lie on other devices
        read = [(s, buffers[slot]) for slot in others if isinstance(s := inputs[slot], Storage)]
        constants = [slot for slot in others if not isinstance(inputs[slot], Storage)]
        storages = [*targets, *(s for s, _ in read)]
        place = itertools.count()
        places = {id(s): next(place) for s in (*storages, *(inputs[slot] for slot in constants))}
        of_arguments = {slot: next(place) for slot in numbers}
        self._arrange = picker(
            [
                of_arguments[slot] if slot in numbers else places[id(s)]
                for slot, s in enumerate(inputs)
            ]
        )
        self._constants = [buffers[slot] for slot in constants]
        self._numbers = list(numbers.values())
        self._loan = Loan(storages)
        self._began, self._lasted = True, 0
        self._trace.note_loan(self._loan)
        return self._loan.beginning(storages, results, [buffer for _, buffer in read])


def other_input(
    sources: Sequence[Operand], seen: Observation, given: Sequence[Storage]
) -> Storage | None:
    """The first input of a call that is not from its place in ``sources``; ``given`` are all the call's arguments.

    A source is the number of an argument, a storage or a constant.
    """
    numbers = numbers_of(given)
    for source, one in zip(sources, seen.inputs, strict=True):
        s = one.storage
        same = numbers.get(id(s)) == source if isinstance(source, int) else s is source
        if not (same or (isinstance(source, Constant) and one.uploaded)):
            return s
    return None


def _storage(tensor: Operand) -> Storage | None:
    return tensor._s if isinstance(tensor, XLATensor) else None
