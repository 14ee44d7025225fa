"""Compares two calls in a row that recorded the same step: what they share, and what differs between calls."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from xla_core.capture import errors
from xla_core.capture.errors import CaptureError, refuse
from xla_core.capture.observation import CLEARED, NEW, Gradient, Input, Line, Observation, Value
from xla_core.contract.device_protocol import Buffer
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.storage import Storage, View, chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor, is_users_class, tensor_on
from xla_core.torch_bridge.operands import Operand, TorchObject, Tree

Buffers: TypeAlias = dict[int | None, Buffer]
"""Buffers of inputs of a program, by slot."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One leaf of the function's result.

    It is a tensor that shows through ``view`` the new storage number ``fresh``, the argument number ``argument``,
    or a ``storage`` that existed before; otherwise it is ``same``, which is returned unchanged.
    """

    fresh: int | None = None
    argument: int | None = None
    storage: Storage | None = None
    view: View | None = None
    same: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fresh:
    """A storage that each call creates: its value, shape and dtype, and an extension's annotation."""

    value: Value
    meta: TensorMeta
    annotation: object


@dataclasses.dataclass(frozen=True, slots=True)
class NewGradient:
    """A parameter whose gradient is a new tensor after the step, ``grad``, with the value ``value``.

    ``none``: the parameter had no gradient before.
    """

    parameter: Operand
    grad: Operand
    value: Value
    none: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """The sources of the program's inputs, and the targets of its results.

    ``inputs`` has for each input a storage that existed before, the number of an argument, or the buffer of a
    constant (in a tuple). ``written`` are storages and numbers of arguments with their new values, ``gradients``
    new gradients, ``fresh`` new storages. ``results`` and ``spec`` make up the function's result. ``entering`` are
    the gradients that are further arguments, as the step takes those that it finds. ``cleared`` are the
    parameters that it leaves without a gradient, and ``present`` the gradients from before it, by parameters' ids.
    """

    inputs: list[Storage | int | tuple[Operand]]
    written: list[tuple[Storage | int, Value]]
    gradients: list[NewGradient]
    fresh: list[Fresh]
    results: list[Result]
    spec: TorchObject
    entering: Sequence[Gradient] = ()
    cleared: Sequence[Operand] = ()
    present: Mapping[int, Operand] = dataclasses.field(default_factory=dict)


def wiring(
    name: str, trace: Trace, former: Observation, latter: Observation, held: Set[int]
) -> Wiring:
    """The wiring that two observations share. Raises CaptureError, which names a difference, if there is none.

    ``held`` are the ids of storages of tensors that the step reaches otherwise than as gradients.
    """
    if former.last is not latter.last:
        raise _other_program(name, former.last, latter.last)
    if former.program is not latter.program:
        raise refuse(
            errors.MSG_NOT_STABLE, name=name, got=f"{len(latter.values)} tensors to keep",
            expected=str(len(former.values)),
        )  # fmt: skip
    cleared = _cleared(name, former, latter)
    entering = _entering(former, latter, held)
    owners = [one.parameter for one in entering]
    old_numbers, numbers = (numbers_of(all_arguments(seen, owners)) for seen in (former, latter))
    inputs: list[Operand] = []
    for a, b in zip(former.inputs, latter.inputs, strict=True):
        old, number = old_numbers.get(id(a.storage)), numbers.get(id(b.storage))
        if old != number:
            raise refuse(errors.MSG_OTHER_TENSOR, name=name, meta=b.storage.meta)
        inputs.append(_input(name, trace, a, b) if number is None else number)
    before = {id(s) for s, _ in former.values} | {id(one.storage) for one in former.inputs}
    before |= {id(leaf._s) for leaf in former.leaves if isinstance(leaf, XLATensor)}
    of_step = [g for g in latter.gradients if g.change == NEW]
    grads = {id(g.grad._s): g for g in of_step if isinstance(g.grad, XLATensor)}
    leaves = {id(x._s) for x in latter.leaves if isinstance(x, XLATensor)}
    written: list[tuple[Storage | int, Value]] = []
    gradients = []
    values: dict[int, Value] = {}
    for s, value in latter.values:
        if id(s) in numbers:
            written.append((numbers[id(s)], value))
        elif id(s) in before:
            written.append((s, value))
        elif id(s) in grads:
            one = grads[id(s)]
            gradients.append(NewGradient(one.parameter, one.grad, value, one.was is None))
        elif id(s) in leaves:
            values[id(s)] = value
        else:
            raise refuse(errors.MSG_KEPT, _line(latter.last, value), name=name, meta=s.meta)
    fresh, results = _results(name, trace, former, latter, values, before, numbers)
    return Wiring(
        inputs, written, gradients, fresh, results, latter.spec, entering, cleared, latter.present()
    )


class Returned:
    """Makes the function's result from what a run has computed; ``index`` has the places of values by number."""

    def __init__(self, trace: Trace, wiring: Wiring, index: Mapping[int, int]) -> None:
        self._trace = trace
        self._index = index
        self.fresh = wiring.fresh
        self.results = wiring.results
        self._spec = wiring.spec
        self._single = wiring.spec.is_leaf() and wiring.results[0].fresh == 0

    def give(
        self, arguments: Sequence[XLATensor], results: Sequence[Operand], kept: Buffers
    ) -> Tree:
        """The function's result; ``kept`` are the buffers of inputs that are values of it."""
        trace, index = self._trace, self._index
        storages = []
        tensors: list[Operand] = []
        for one in self.fresh:
            vid = one.value.vid
            buffer = results[index[vid]] if vid is not None else kept[one.value.slot]
            tensor = trace.from_buffer(buffer, one.meta)
            if one.annotation is not None:
                tensor._s.annotate(one.annotation)
            tensors.append(tensor)
            storages.append(tensor._s)
        if self._single and self.results[0].view is None:
            return tensors[0]
        given = []
        for r in self.results:
            if r.fresh is not None:
                given.append(
                    tensors[r.fresh] if r.view is None else shown(storages[r.fresh], r.view)
                )
            elif r.argument is not None:
                t = arguments[r.argument]
                given.append(t if r.view is t._v else shown(t._s, r.view))
            elif r.storage is not None:
                given.append(shown(r.storage, r.view))
            else:
                given.append(r.same)
        return pytree.tree_unflatten(given, self._spec)


def static_wiring(observed: Observation) -> Wiring:
    """The wiring of one block, whose replays read and write the same tensors as the block."""
    inputs: list[Operand] = [
        (one.buffer,) if one.uploaded else one.storage for one in observed.inputs
    ]
    return Wiring(inputs, list(observed.values), [], [], [Result()], observed.spec)


def gradients_in_one(former: Observation, latter: Observation) -> list[Operand]:
    """The parameters that had a gradient before one of two calls only."""
    difference = former.present().keys() ^ latter.present().keys()
    by_id = {id(g.parameter): g.parameter for g in (*former.gradients, *latter.gradients)}
    return [p for key, p in by_id.items() if key in difference]


def _cleared(name: str, former: Observation, latter: Observation) -> list[Operand]:
    """The parameters that a step leaves without a gradient. Raises CaptureError if two calls differ in that."""
    olds = {id(g.parameter): g for g in former.gradients}
    news = {id(g.parameter): g for g in latter.gradients}
    cleared = []
    for key, one in (olds | news).items():
        nothing = Gradient(one.parameter, None, None)
        old, new = olds.get(key, nothing), news.get(key, nothing)
        # a parameter without a gradient needs no clearing
        changes = {g.change for g in (old, new) if g.grad is not None or g.was is not None}
        if len(changes) > 1:
            raise refuse(errors.MSG_GRADIENT_CHANGE, name=name, shape=tuple(one.parameter.shape))
        if changes == {CLEARED}:
            cleared.append(one.parameter)
    return cleared


def _entering(former: Observation, latter: Observation, held: Set[int]) -> list[Gradient]:
    """Those gradients of the latter call that the step takes as it finds them, in both calls.

    Such a gradient must be an ordinary tensor with a storage of its own, which the step reaches as a gradient only.
    """
    touched = {id(one.storage) for one in latter.inputs} | {id(s) for s, _ in latter.values}
    touched |= {id(leaf._s) for leaf in latter.leaves if isinstance(leaf, XLATensor)}
    taken = held | set(map(id, (*former.arguments, *latter.arguments)))
    olds, news = _own_gradients(former, taken), _own_gradients(latter, taken)
    return [one for key, one in news.items() if key in olds and id(one.was._s) in touched]


def _own_gradients(observation: Observation, taken: Set[int]) -> dict[int, Gradient]:
    """By parameters' ids, the gradients from before the call that have storages of their own."""
    before = [g for g in observation.gradients if isinstance(g.was, XLATensor)]
    owners = collections.Counter(id(g.was._s) for g in before)
    return {
        id(g.parameter): g
        for g in before
        if type(g.was) is XLATensor and g.was._v is None
        and owners[id(g.was._s)] == 1 and id(g.was._s) not in taken
    }  # fmt: skip


def numbers_of(storages: Sequence[Storage]) -> dict[int, int]:
    """The numbers of storages in a sequence, by their ids."""
    return {id(s): number for number, s in enumerate(storages)}


def all_arguments(observation: Observation, entering: Sequence[Operand]) -> list[Storage]:
    """The storages of the function's arguments, then of the gradients that parameters had before the call."""
    was = {id(g.parameter): g.was for g in observation.gradients}
    return [*observation.arguments, *(was[id(p)]._s for p in entering)]


def _input(name: str, trace: Trace, a: Input, b: Input) -> Storage | tuple[object]:
    if a.uploaded and b.uploaded:
        if not _equal(trace, a.buffer, b.buffer):
            raise refuse(errors.MSG_HOST_VALUE, b.line, name=name, meta=b.storage.meta)
        return (b.buffer,)
    if a.storage is not b.storage or a.uploaded != b.uploaded:
        raise refuse(errors.MSG_OTHER_TENSOR, name=name, meta=b.storage.meta)
    return b.storage


def _equal(trace: Trace, a: Operand, b: Operand) -> bool:
    """Whether two values are the same bytes."""
    first, second = (np.asarray(trace.backend.get(one)) for one in (a, b))
    return first.tobytes() == second.tobytes()


def _results(
    name: str,
    trace: Trace,
    former: Observation,
    latter: Observation,
    values: dict[int, Value],
    before: set[int],
    numbers: dict[int, int],
) -> tuple[list[Fresh], list[Result]]:
    if former.spec != latter.spec:
        raise refuse(
            errors.MSG_RESULT, name=name, got="results in another structure", device=trace.device
        )
    fresh: list[Fresh] = []
    places: dict[int, int] = {}
    results = []
    for a, b in zip(former.leaves, latter.leaves, strict=True):
        if is_users_class(type(b)):
            raise refuse(errors.MSG_CLASS, name=name, cls=type(b).__qualname__)
        if not isinstance(b, XLATensor) or b._s.trace is not trace:
            if not _is_constant(a, b):
                raise refuse(errors.MSG_RESULT, name=name, got=_told(b), device=trace.device)
            results.append(Result(same=b))
            continue
        s = b._s
        if id(s) in numbers:
            results.append(Result(argument=numbers[id(s)], view=b._v))
        elif a is b:
            results.append(Result(same=b))
        elif id(s) in values:
            if id(s) not in places:
                places[id(s)] = len(fresh)
                fresh.append(Fresh(values[id(s)], s.meta, getattr(s, "annotation", None)))
            results.append(Result(fresh=places[id(s)], view=b._v))
        elif id(s) in before:
            results.append(Result(storage=s, view=b._v))
        else:
            raise refuse(errors.MSG_RESULT, name=name, got=_told(b), device=trace.device)
    return fresh, results


def _is_constant(a: Operand, b: Operand) -> bool:
    if a is b:
        return True
    return not isinstance(b, torch.Tensor) and type(a) is type(b) and repr(a) == repr(b)


def _told(value: Operand) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor on {value.device} that the step does not compute"
    return repr(value)


# -- differences ----------------------------------------------------------------------------------


def _other_program(name: str, former: Entry, latter: Entry) -> CaptureError:
    """The error for two steps whose operations differ, with the first different operation and its line."""
    old, new = former.path(), latter.path()
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a is not b), None)
    if at is None:
        at = min(len(old), len(new))
    a, b = _operation(old, at), _operation(new, at)
    line = b.line if b is not None else a.line if a is not None else None
    return refuse(
        errors.MSG_NOT_STABLE, line, name=name,
        got=_described(b), expected=_described(a),
    )  # fmt: skip


def _operation(path: Sequence[Entry], start: int) -> Operation | None:
    return next(iter(operations_of(path[start:])), None)


def _described(entry: Operation | None) -> str:
    if entry is None:
        return "the end of the step"
    words = [repr(word) for word in entry.key[1:] if not isinstance(word, type)]
    return f"{entry.plan.name}({', '.join(words)})"


def lifting(last: Entry, position: int, is_float: bool) -> Entry | None:
    """The operation that lifted the number at this position of a step's floats or integers."""
    for entry in last.path():
        if (entry.floats if is_float else entry.ints) > position:
            return entry
    return None


def check_numbers(
    name: str, former: Observation, latter: Observation, free: set[int], seeds: set[int]
) -> None:
    """Raise CaptureError for numbers that differ, except floats at positions ``free`` and integers at ``seeds``."""
    for is_float, olds, news, exempt in (
        (True, former.floats, latter.floats, free),
        (False, former.ints, latter.ints, seeds),
    ):
        for position, (old, new) in enumerate(zip(olds, news, strict=True)):
            if position not in exempt and repr(old) != repr(new):
                entry = lifting(latter.last, position, is_float)
                line = None if entry is None else entry.line
                operator = entry.plan.name if isinstance(entry, Operation) else ""
                raise refuse(errors.MSG_FLOAT, line, name=name, operator=operator, old=old, new=new)


def _line(last: Entry, value: Value) -> Line:
    """The line that computed a value."""
    if value.vid is None:
        return None
    for entry in last.path():
        if entry.first <= value.vid < entry.end:
            return entry.line
    return None


def shown(s: Storage, view: View | None) -> torch.Tensor:
    """A tensor that shows a storage through a chain of views like ``view``."""
    return tensor_on(s, viewed(view))


def viewed(view: View | None) -> View | None:
    """A chain of views like ``view``, for another storage of the same shape."""
    copied: View | None = None
    for one in chain(view):
        copied = View(copied, one.plan, one.tail, one.args, one.meta, -1, -1, -1)
    return copied
