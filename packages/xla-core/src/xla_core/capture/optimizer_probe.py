"""Finds out how the numbers in an optimizer's step are computed, by a step of a stand-in on other numbers.

The stand-in has the optimizer's class, and parameters, gradients and state of the same shapes in a trace that never
runs. Its learning rates, betas and so on differ from the optimizer's and are ``Traced``. A number that it lifts is
either computed from these; then the same formula on the true numbers must give the number that the optimizer
lifted. Or it equals the optimizer's number, and is a constant.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import torch

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.traced_numbers import Branches, Expression, Formulas, Read, Source, Table
from xla_core.execution import runtime
from xla_core.operators.error_messages import ValueNeededError
from xla_core.recording.entry import Entry, Operation
from xla_core.recording.storage import PLACEHOLDER, chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import Operand, Operands
from xla_core.torch_bridge.torch_private import disabled_torch_function

MSG_PROBE: Final = "a stand-in's numbers are never read"

WHY_OTHER_STEP: Final = "with another learning rate it takes another kind of step"
WHY_BRANCHES: Final = "it decides by a number that changes from step to step"
WHY_UNKNOWN: Final = "{value!r} is computed in a way that cannot be followed"
WHY_FAILED: Final = "a stand-in of it fails: {error}"

# not the one of Python's module, whose state belongs to the user
_RANDOM: Final = random.Random(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The ``expressions`` of a window's floats, by their position in it.

    ``constant`` are sources that are constants of the program, ``nonzero`` sources that must keep their sign.
    """

    expressions: dict[int, Expression]
    constant: frozenset[Source]
    nonzero: frozenset[Source]


class StepCount(torch.Tensor):
    """A CPU tensor with a number of steps, whose ``item()`` is ``Traced``."""

    __torch_function__ = disabled_torch_function
    table: Table
    begin: float
    group: object

    def item(self) -> Operand:
        """The number of steps so far."""
        value = float(super().item())
        return self.table.source(value, ("step", self.group, value - self.begin))


_scratch: weakref.WeakKeyDictionary[Trace, Trace] = weakref.WeakKeyDictionary()


def _refuse(_trace: Trace, _reading: bool = False) -> None:
    raise ValueNeededError(MSG_PROBE)


def _scratch_of(trace: Trace) -> Trace:
    scratch = _scratch.get(trace)
    if scratch is None:
        scratch = _scratch[trace] = Trace(trace.device, _refuse, trace.backend)
        scratch.forbid(MSG_PROBE)
        scratch.refuse_reads(MSG_PROBE)
    scratch.attach(trace.backend)
    return scratch


def explain(
    optimizer: object,
    arguments: tuple[object, ...],
    trace: Trace,
    floats: Sequence[float],
    entries: Sequence[Entry],
) -> Explanation | str:
    """How the lifted ``floats`` of the last step of ``optimizer`` are computed, or why that is not known.

    ``arguments`` are the positional and keyword arguments of ``step``; ``entries`` are the entries that it
    recorded.
    """
    scratch = _scratch_of(trace)
    table = Table()
    with scratch.lock:
        scratch.reset()
        try:
            _stand_in(optimizer, arguments, scratch, table)
            probed, steps = list(scratch.floats), scratch.cur.path()
        except Branches:
            return WHY_BRANCHES
        except Exception as error:
            return WHY_FAILED.format(error=error)
        finally:
            scratch.reset()
    constants, others = _constants(entries), _constants(steps)
    if len(floats) != len(probed) or len(constants) != len(others):
        return WHY_OTHER_STEP
    fixed: set[Source] = set()
    for true, other in zip(constants, others, strict=True):
        if other in table.expressions:
            fixed |= _sources(table.expressions[other])
        elif true != other:
            return WHY_UNKNOWN.format(value=true)
    expressions = {i: table.expressions[v] for i, v in enumerate(probed) if v in table.expressions}
    formulas = Formulas(list(floats), expressions, lambda source: reader(optimizer, source))
    for true, other in zip(floats, formulas.evaluate().tolist(), strict=True):
        if repr(true) != repr(other):
            return WHY_UNKNOWN.format(value=true)
    for i, (true, other) in enumerate(zip(floats, probed, strict=True)):
        if i not in expressions and true != other:
            return WHY_UNKNOWN.format(value=true)
    return Explanation(expressions, frozenset(fixed), frozenset(table.nonzero))


def reader(optimizer: torch.optim.Optimizer, source: Source) -> Read:
    """A function that reads the present value of a source of an optimizer's numbers."""
    if source[0] == "group":
        group, key = optimizer.param_groups[source[1]], source[2]
        if len(source) == 4:
            return lambda: _number(group[key][source[3]], key)
        return lambda: _number(group[key], key)
    # a count is read after the step, so it is ahead by as many steps as it was in the stand-in
    _, (number, key), ahead = source
    parameter = list(optimizer.state)[number]
    state, behind = optimizer.state[parameter], ahead - 1.0
    return lambda: state[key].item() + behind


def _number(value: Operand, key: str) -> float:
    if type(value) is not float and type(value) is not int:
        raise refuse(errors.MSG_NO_NUMBER, key=key, got=type(value).__name__)
    return value


def _sources(expression: Expression) -> set[Source]:
    if not isinstance(expression, tuple):
        return set()
    if expression[0] == "source":
        return {expression[1]}
    return set().union(*map(_sources, expression[1:]))


def _constants(entries: Sequence[Entry]) -> list[Operand]:
    """The constants in the keys of a step's operations: the names of the operations, and floats."""
    constants: list[object] = []
    for entry in entries:
        if not isinstance(entry, Operation):
            continue
        constants.append(entry.plan.name)
        previous = None
        for word in entry.key:
            if previous is float:
                constants.append(word)
            previous = word
    return constants


def _stand_in(
    optimizer: torch.optim.Optimizer, arguments: Operands, scratch: Trace, table: Table
) -> None:
    """Take a step of a stand-in of ``optimizer`` in the trace ``scratch``."""
    tensors: dict[int, Operand] = {}

    def shown(t: Operand) -> Operand:
        if not isinstance(t, XLATensor):
            return t
        known = tensors.get(id(t))
        if known is None:
            meta = t._s.meta if t._v is None else chain(t._v)[-1].meta
            known = tensors[id(t)] = scratch.from_buffer(PLACEHOLDER, meta)
        return known

    copied = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if isinstance(value, XLATensor):
            setattr(copied, name, shown(value))
        elif name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(copied, name, OrderedDict())
    parameters: dict[int, torch.Tensor] = {}
    copied.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        changed = {
            k: _changed(v, table, ("group", number, k)) for k, v in group.items() if k != "params"
        }
        changed["params"] = []
        for p in group["params"]:
            other = shown(p)
            if p.grad is not None:
                grad = shown(p.grad)
                other = other.requires_grad_(True)
                other.grad = grad
            parameters[id(p)] = other
            changed["params"].append(other)
        copied.param_groups.append(changed)
    copied.state = _state(optimizer, parameters, shown, table)
    args, kwargs = arguments
    with torch.no_grad(), runtime.standing_in(scratch):
        # without its wrappers, which call hooks and record profiles
        named = {name: shown(a) for name, a in kwargs.items()}
        inspect.unwrap(type(copied).step)(copied, *map(shown, args), **named)


def _changed(value: Operand, table: Table, source: Source) -> Operand:
    """A traced number slightly below a nonzero float, different from all other numbers; other values unchanged."""
    if type(value) is float and value:
        return table.source(value * (1 - _RANDOM.uniform(1e-4, 1e-3)), source)
    if type(value) is tuple:
        return tuple(_changed(one, table, (*source, i)) for i, one in enumerate(value))
    return value


def _state(
    optimizer: torch.optim.Optimizer,
    parameters: dict[int, object],
    shown: Callable[[object], object],
    table: Table,
) -> dict[torch.Tensor, dict[str, object]]:
    state: defaultdict[torch.Tensor, dict[str, object]] = defaultdict(dict)
    counts: dict[float, tuple[float, tuple[int, str]]] = {}
    for number, (p, values) in enumerate(optimizer.state.items()):
        if id(p) not in parameters or not isinstance(values, dict):
            continue
        state[parameters[id(p)]] = own = {}
        for key, value in values.items():
            if type(value) is torch.Tensor and value.dim() == 0 and value.is_floating_point():
                true = value.item()
                first, group = counts.setdefault(
                    true, (true + _RANDOM.randint(2, 9), (number, key))
                )
                count = torch.tensor(first, dtype=value.dtype).as_subclass(StepCount)
                count.table, count.begin, count.group = table, first, group
                own[key] = count
            else:
                own[key] = shown(value)
    return state
