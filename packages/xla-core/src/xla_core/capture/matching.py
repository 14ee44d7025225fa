"""Compares two calls in a row that recorded the same step: what they share, and what differs between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from xla_core.capture import errors
from xla_core.capture.errors import CaptureError, refuse
from xla_core.capture.observation import Gradient, Input, Line, Observation, Value
from xla_core.contract.device_protocol import Buffer
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.storage import Storage, View, chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor, is_users_class
from xla_core.torch_bridge.operands import Operand, TorchObject

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

    ``none``: the parameter had no gradient before. ``slot`` is the input slot of the former gradient, if the step
    reads it.
    """

    parameter: Operand
    grad: Operand
    value: Value
    none: bool
    slot: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """The sources of the program's inputs, and the targets of its results.

    ``inputs`` has for each input a storage that existed before, the number of an argument, or the buffer of a
    constant (in a tuple). ``written`` are storages and numbers of arguments with their new values, ``gradients``
    new gradients, ``fresh`` new storages. ``results`` and ``spec`` make up the function's result.
    """

    inputs: list[Storage | int | tuple[Operand]]
    written: list[tuple[Storage | int, Value]]
    gradients: list[NewGradient]
    fresh: list[Fresh]
    results: list[Result]
    spec: TorchObject


def wiring(name: str, trace: Trace, former: Observation, latter: Observation) -> Wiring:
    """The wiring that two observations share. Raises CaptureError, which names a difference, if there is none."""
    if former.last is not latter.last:
        raise _other_program(name, former.last, latter.last)
    if former.program is not latter.program:
        raise refuse(
            errors.MSG_NOT_STABLE, name=name, got=f"{len(latter.values)} tensors to keep",
            expected=str(len(former.values)),
        )  # fmt: skip
    inputs: list[Operand] = []
    slots: dict[int, int] = {}
    for slot, (a, b) in enumerate(zip(former.inputs, latter.inputs, strict=True)):
        gradient = _former_gradient(former, latter, a, b)
        if gradient is not None:
            slots[id(gradient.grad)] = slot
            inputs.append(gradient.grad._s)
        else:
            inputs.append(_input(name, trace, a, b))
    before = {id(s) for s, _ in former.values} | {id(one.storage) for one in former.inputs}
    before |= {id(leaf._s) for leaf in former.leaves if isinstance(leaf, XLATensor)}
    numbers = {id(s): number for number, s in enumerate(latter.arguments)}
    grads = {id(g.grad._s): g for g in latter.gradients if isinstance(g.grad, XLATensor)}
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
            gradient_of = grads[id(s)]
            was_slot, none = slots.get(id(gradient_of.grad)), gradient_of.was is None
            gradients.append(
                NewGradient(gradient_of.parameter, gradient_of.grad, value, none, was_slot)
            )
        elif id(s) in leaves:
            values[id(s)] = value
        else:
            raise refuse(errors.MSG_KEPT, _line(latter.last, value), name=name, meta=s.meta)
    fresh, results = _results(name, trace, former, latter, values, before, numbers)
    return Wiring(inputs, written, gradients, fresh, results, latter.spec)


def static_wiring(observed: Observation) -> Wiring:
    """The wiring of one block, whose replays read and write the same tensors as the block."""
    inputs: list[Operand] = [
        (one.buffer,) if one.uploaded else one.storage for one in observed.inputs
    ]
    return Wiring(inputs, list(observed.values), [], [], [Result()], observed.spec)


def _former_gradient(
    former: Observation, latter: Observation, a: Input, b: Input
) -> Gradient | None:
    """The new gradient of the parameter whose former gradient this input was, in both calls; None otherwise."""
    if a.storage is b.storage:
        return None
    for one in latter.gradients:
        if isinstance(one.was, XLATensor) and one.was._s is b.storage:
            for other in former.gradients:
                if other.parameter is one.parameter and isinstance(other.was, XLATensor):
                    return one if other.was._s is a.storage and one.grad is not None else None
    return None


def _input(name: str, trace: Trace, a: Input, b: Input) -> Storage | int | tuple[object]:
    if b.argument is not None and a.argument == b.argument:
        return b.argument
    if a.uploaded and b.uploaded:
        if not _equal(trace, a.buffer, b.buffer):
            raise refuse(errors.MSG_HOST_VALUE, b.line, name=name, meta=b.storage.meta)
        return (b.buffer,)
    if a.storage is not b.storage or a.argument != b.argument or a.uploaded != b.uploaded:
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


def viewed(view: View | None) -> View | None:
    """A chain of views like ``view``, for another storage of the same shape."""
    copied: View | None = None
    for one in chain(view):
        copied = View(copied, one.plan, one.tail, one.args, one.meta, -1, -1, -1)
    return copied
