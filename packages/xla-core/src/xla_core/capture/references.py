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
from xla_core.capture.matching import NewGradient
from xla_core.recording.storage import HeldBuffer, Loan, Storage
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Replacements, XLATensor
from xla_core.torch_bridge.operands import Operand
from xla_core.torch_bridge.torch_private import without_torch_function

_BUFFER: Final = operator.attrgetter("buffer")
_GRAD: Final = operator.attrgetter("grad")
_STORAGE: Final = operator.attrgetter("_s")


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

# The number of lists of a replay that contain the storage of an input.
_LISTS_OF_INPUTS: Final = 3


def picker(places: Sequence[int]) -> Callable[[Sequence[Operand]], Sequence[Operand]]:
    """A function, in C, that gives the items of a sequence at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first, end = (places[0], places[0] + 1) if places else (0, 0)
    return operator.itemgetter(slice(first, end))


class Gradients:
    """The gradients that a step fills (``tensors`` of the parameters ``owners``), and those that it must find.

    ``looked_at`` are the ids of parameters whose gradients the step looks at, and of storages of such gradients.
    """

    def __init__(
        self, name: str, filled: Sequence[NewGradient], guards: Guards, looked_at: Set[int]
    ) -> None:
        self._name = name
        self.owners = [one.parameter for one in filled]
        self.tensors = [one.grad for one in filled]
        # the tensors and then their storages; filled when it is needed
        self._held: list[Operand] = []
        self._unshared = [_HELD_GRADIENT] * len(filled) + [_OF_GRADIENT] * len(filled)
        self._must_be_none = [one.parameter for one in filled if one.none]
        self._read = {i: one.slot for i, one in enumerate(filled) if one.slot is not None}
        self._replacements = Replacements.count
        own = set(map(id, self.owners))
        self._others = [
            p
            for p in guards.parameters()
            if id(p) not in own
            and (guards.names_gradients or id(p) in looked_at or id(_storage(p.grad)) in looked_at)
        ]
        self._of_others = list(map(_GRAD, self._others))
        self._storages_of_others = list(map(_storage, self._of_others))
        self._seen = Replacements.count

    @property
    def are_read(self) -> bool:
        """Whether the step adds to a gradient."""
        return bool(self._read)

    def check(self, inputs: Sequence[Storage | Constant]) -> None:
        """Raise CaptureError if a gradient is not the one that the step expects; ``inputs`` are its program's."""
        if self._others:
            with without_torch_function():
                changed = any(map(operator.is_not, map(_GRAD, self._others), self._of_others))
            if changed or Replacements.count != self._seen:
                self._check_others()
        for p in self._must_be_none:
            if p.grad is not None:
                what = f"a parameter of {tuple(p.shape)}"
                raise refuse(errors.MSG_GRADIENT, name=self._name, what=what)
        for i, slot in self._read.items():
            grad = self.owners[i].grad
            if grad is not self.tensors[i] or grad._s is not inputs[slot]:
                raise self._replaced(self.owners[i])

    def _check_others(self) -> None:
        expected = zip(self._others, self._of_others, self._storages_of_others, strict=True)
        for p, grad, storage in expected:
            if p.grad is not grad or _storage(grad) is not storage:
                raise self._replaced(p)
        self._seen = Replacements.count

    def _replaced(self, p: torch.Tensor) -> errors.CaptureError:
        what = f"the gradient of a parameter of {tuple(p.shape)}"
        return refuse(errors.MSG_REPLACED, name=self._name, what=what)

    def use(self, tensors: Sequence[Operand]) -> None:
        """Use other tensors, which the parameters have as their gradients."""
        self.tensors[:] = tensors
        self._held = []

    def are_unshared(self, targets: Sequence[Storage]) -> bool:
        """Whether the parameters have these gradients, and nothing else refers to them or to their storages.

        Their storages are the last of ``targets``.
        """
        if self._read or Replacements.count != self._replacements:
            return False
        # torch would look for a __torch_function__ of their class in every access: half of its time
        with without_torch_function():
            if any(map(operator.is_not, map(_GRAD, self.owners), self.tensors)):
                return False
        if not self._held:
            self._held = [*self.tensors, *targets[len(targets) - len(self.tensors) :]]
        return list(map(getrefcount, self._held)) == self._unshared

    def renewed(
        self, trace: Trace, targets: Sequence[Storage], first: int
    ) -> Iterator[tuple[int, int | None, Storage]]:
        """Use new tensors in place of those with other references, or with another storage (``grad.data = ...``).

        Gives their numbers, input slots and new storages; the gradients' are the ``targets`` from ``first`` on.
        """
        tensors = self.tensors
        self._replacements = Replacements.count
        self._held = []
        attached = list(map(operator.is_, map(_GRAD, self.owners), tensors))
        counts = list(map(getrefcount, tensors))
        of_storages = list(map(getrefcount, map(_STORAGE, tensors)))
        for i, slot in enumerate(map(self._read.get, range(len(tensors)))):
            target = targets[first + i]
            own = _OWNED if slot is None else _OWNED + _LISTS_OF_INPUTS
            alone = counts[i] <= (_GRADIENT if attached[i] else ALONE) and of_storages[i] <= own
            if not alone or tensors[i]._s is not target:
                tensors[i] = fresh = trace.from_buffer(None, target.meta)
                yield i, slot, fresh._s

    def attach(self) -> None:
        """Set the parameters' gradients to those of the step."""
        for p, g in zip(self.owners, self.tensors, strict=True):
            if p.grad is not g:
                p.grad = g


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


def _storage(tensor: Operand) -> Storage | None:
    return tensor._s if isinstance(tensor, XLATensor) else None
