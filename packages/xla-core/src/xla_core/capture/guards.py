"""Checks that nothing has changed since a step was recorded on which its replay depends.

``Guards.check`` runs before every replay. It compares objects by identity, in C, which takes a few tens of
nanoseconds each. Hooks and replaced storages are only compared if the counter of their changes has risen.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import torch

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.reachable import Reachable, is_equivalent
from xla_core.capture.slots import (
    Attribute,
    Contents,
    Made,
    Rates,
    Slot,
    is_constant,
    is_same,
    present,
    summary_of,
    tables_of,
    text_of,
)
from xla_core.contract.foreign_values import ForeignObject
from xla_core.recording.storage import Storage
from xla_core.recording.xla_tensor import Replacements, XLATensor
from xla_core.torch_bridge import module_tables
from xla_core.torch_bridge.operands import Operand

_CONTENTS: Final = operator.attrgetter("cell_contents")
_GRAD: Final = operator.attrgetter("grad")
_VALUE: Final = operator.methodcaller("value")
_VERSION: Final = operator.attrgetter("_version")
TRAINING: Final = operator.attrgetter("training")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
# Larger arrays and tensors on the host are not compared, as that would take too long.
_MOST_BYTES: Final = 1 << 16
_IS_NOT: Final = operator.is_not
# Names in code that reads the gradients of parameters.
_READ_GRADIENTS: Final = "grad", "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"

_Mode: TypeAlias = tuple[ForeignObject, bool, bool]
"""A module, and its ``training`` before and after a call."""


class Snapshot:
    """The contents of reachable slots at one moment: numbers, tensors, and the lengths of containers."""

    def __init__(self, reachable: Reachable) -> None:
        self.slots = reachable.slots
        values = [slot.value() for slot in self.slots]
        self.values = list(map(summary_of, values))
        self._host = HostValues.of(reachable)
        looked_in = {id(slot.mapping) for slot in self.slots}
        self._holders = [
            (slot, type(value), number, id(table))
            for slot, value in zip(self.slots, values, strict=True)
            for number, table in enumerate(tables_of(value))
            if id(table) in looked_in
        ]

    def check_unchanged(self, name: str) -> None:
        """Raise CaptureError for a slot that the call has changed, as a replay would not change it."""
        if (written := self._host.changed()) is not None:
            raise refuse(errors.MSG_HOST_WRITTEN, name=name, what=written)
        replaced = self._replaced()
        for slot, old in zip(self.slots, self.values, strict=True):
            new = summary_of(present(slot, replaced))
            if not is_same(old, new):
                if isinstance(new, torch.Tensor):
                    raise refuse(errors.MSG_REBOUND, name=name, what=slot.path)
                raise refuse(
                    errors.MSG_SIDE_EFFECT,
                    name=name,
                    what=slot.path,
                    old=text_of(old),
                    new=text_of(new),
                )

    def _replaced(self) -> dict[int, ForeignObject]:
        """What the call has put in the place of containers and objects, by the id of what slots look in.

        ``self.state = State(self.state.count + 1)`` changes no slot of the old object.
        """
        replaced: dict[int, ForeignObject] = {}
        known = -1
        while known < len(replaced):  # again, for what is inside of the new ones
            known = len(replaced)
            for slot, kind, number, old in self._holders:
                value = present(slot, replaced)
                if type(value) is kind and id(table := tables_of(value)[number]) != old:
                    replaced[old] = table
        return replaced


class HostValues:
    """Tensors and arrays on the host that a step may read; their values are constants of its recording."""

    def __init__(self, values: Iterable[tuple[str, Operand]]) -> None:
        known = {id(value): (path, value) for path, value in values}
        tensors = [one for one in known.values() if isinstance(one[1], torch.Tensor)]
        # a tensor of inference mode has no version, and cannot be written outside of that mode
        tensors = [
            (path, t) for path, t in tensors if t.device.type == "cpu" and not t.is_inference()
        ]
        self._paths = [path for path, _ in tensors]
        self._tensors = [t for _, t in tensors]
        self._versions = list(map(_VERSION, self._tensors))
        self._values = [_copied(t) for t in self._tensors]
        self._arrays = [
            (path, array, array.tobytes())
            for path, array in known.values()
            if isinstance(array, np.ndarray) and array.nbytes <= _MOST_BYTES
        ]

    @classmethod
    def of(cls, reachable: Reachable) -> HostValues:
        """The tensors and arrays on the host that are reachable."""
        values = ((slot.path, slot.value()) for slot in reachable.slots)
        return cls(itertools.chain(values, reachable.tensors_of_modules()))

    def changed(self) -> str | None:
        """The path of one whose value has changed since, or None."""
        if list(map(_VERSION, self._tensors)) != self._versions:
            for path, t, value in zip(self._paths, self._tensors, self._values, strict=True):
                if value is None or not torch.equal(t, value):
                    return path
            self._versions = list(map(_VERSION, self._tensors))
        for path, array, content in self._arrays:
            if array.tobytes() != content:
                return path
        return None


def _copied(t: torch.Tensor) -> torch.Tensor | None:
    """A copy of a tensor on the host to compare with later; None for a large one."""
    return t.detach().clone() if t.numel() * t.element_size() <= _MOST_BYTES else None


# Looking so many keys of a mapping up in one call takes less time than one by one.
_ONE_LOOKUP: Final = 4
# Comes after the contents of tables, which are compared as far as the shorter of two sequences goes.
END: Final = (object(),)


class _Items:
    """Slots in mappings, looked up in C; ``slots`` are in the order in which ``values`` gives their values."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        grouped: dict[int, list[Slot]] = {}
        for slot in slots:
            grouped.setdefault(id(slot.mapping), []).append(slot)
        groups = [group for group in grouped.values() if len(group) >= _ONE_LOOKUP]
        few = [slot for group in grouped.values() if len(group) < _ONE_LOOKUP for slot in group]
        self.slots = [*few, *itertools.chain(*groups)]
        self._mappings_of_few = _mappings(few)
        self._keys_of_few = _keys(few)
        self._mappings = [group[0].mapping for group in groups]
        self._lookups = [operator.itemgetter(*(slot.key for slot in group)) for group in groups]

    def values(self) -> Iterator[Operand]:
        """The present values. Raises LookupError, when it comes to a slot that is not there."""
        return itertools.chain(
            map(operator.getitem, self._mappings_of_few, self._keys_of_few),
            itertools.chain.from_iterable(map(operator.call, self._lookups, self._mappings)),
        )


def _mappings(slots: Iterable[Slot]) -> list[ForeignObject]:
    return [slot.mapping for slot in slots]


def _keys(slots: Iterable[Slot]) -> list[ForeignObject]:
    return [slot.key for slot in slots]


class _OptimizerState:
    """What an optimizer keeps for its parameters: ``views`` of it, which must go on to give the same ``values``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        entries = optimizer.state.values()
        self.optimizer = optimizer
        self.views = [entries, *(one.values() for one in entries if isinstance(one, dict))]
        self.values = list(itertools.chain.from_iterable(self.views))

    def has(self, storages: Set[int]) -> bool:
        """Whether one of its tensors has one of the storages with these ids."""
        return any(isinstance(v, XLATensor) and id(v._s) in storages for v in self.values)

    def is_like(self, other: _OptimizerState) -> bool:
        """Whether the values are the same, but for empty tables: looking at ``state[parameter]`` makes one."""
        mine, theirs = (
            [id(v) for v in one.values if not isinstance(v, dict) or v] for one in (self, other)
        )
        return mine == theirs


class _OwnAttributes:
    """The attributes that objects have of their own: a new one may take the place of a function of the class."""

    def __init__(self, reachable: Reachable) -> None:
        rows = reachable.owners
        self._calls = reachable.calls
        self._paths = [path for path, _, _ in rows]
        self._tables = [table for _, table, _ in rows]
        self._kinds = [kind for _, _, kind in rows]
        self._known = list(map(set, self._tables))
        self._counts = list(map(len, self._tables))

    def shadowing(self) -> tuple[str, object] | None:
        """The path and the value of a new attribute that takes the place of a function that the step may call."""
        if list(map(len, self._tables)) == self._counts:
            return None
        rows = zip(self._paths, self._tables, self._kinds, self._known, strict=True)
        for path, table, kind, known in rows:
            for key in table.keys() - known:
                if self._calls(kind, key) and not is_equivalent(table[key]):
                    return f"{path}.{key}", table[key]
            known |= table.keys()
        self._counts = list(map(len, self._tables))
        return None


class Guards:
    """The checks before the replays of one recording."""

    def __init__(self, name: str, reachable: Reachable) -> None:
        self._name = name
        self._reachable = reachable
        self.names_gradients = any(map(reachable.names, _READ_GRADIENTS))
        self.clears_gradients = reachable.names("zero_grad")
        self._host = HostValues.of(reachable)
        self._bind_slots()
        self._modules = [m for _, m in reachable.modules.values()]
        self._kinds = list(map(type, self._modules))
        self._attributes = _OwnAttributes(reachable)
        self._optimizers = list(reachable.optimizers.values())
        self._watched_states: list[_OptimizerState] = []
        self._bind_tables()
        self._bind_tensors()
        self._hooks = self._hooks_now()
        self._registered = module_tables.hooks_registered()

    def _bind_slots(self) -> None:
        reachable = self._reachable
        watched = [s for s in reachable.slots if s.value() is not s]
        if not reachable.sets_modes:
            roots = reachable.roots
            watched += [Slot(f"{path}.training", vars(m), "training") for path, m in roots]
        cells = [s for s in watched if isinstance(s.mapping, types.CellType)]
        of_classes = [s for s in watched if isinstance(s, Attribute)]
        produced = [s for s in watched if isinstance(s, Made)]
        look_ups = [s.look_up for s in produced]
        copies = [s for s in watched if isinstance(s, (Rates, Contents))]
        others = set(map(id, (*cells, *of_classes, *produced, *copies)))
        self._items = _Items(s for s in watched if id(s) not in others)
        groups = (
            (self._items.values, self._items.slots),
            (partial(map, _CONTENTS, _mappings(cells)), cells),
            (partial(map, getattr, _mappings(of_classes), _keys(of_classes)), of_classes),
            (partial(map, operator.call, look_ups, _mappings(produced), _keys(produced)), produced),
            (partial(map, _VALUE, copies), copies),
        )
        # a function that looks the present values up, the slots, and the values that they had
        self._groups = [(f, slots, [s.value() for s in slots]) for f, slots in groups if slots]

    def _bind_tables(self) -> None:
        tables: list[dict[str, object]] = []
        for module in self._modules:
            tables += (*module_tables.tensor_tables(module), module_tables.submodules(module))
        looked_up: dict[int, set[object]] = {}
        for slot in self._items.slots:
            looked_up.setdefault(id(slot.mapping), set()).add(slot.key)
        self._empty = [table for table in tables if not table]
        # all of what is in these is among the items
        self._known = [t for t in tables if t and t.keys() <= looked_up.get(id(t), set())]
        known = set(map(id, self._known))
        self._lengths = sum(map(len, self._known))
        self._others = [table.values() for table in tables if table and id(table) not in known]
        self._bind_views()
        self._everything = [value for table in tables for value in table.values()]

    def _bind_views(self) -> None:
        """Note what is in the tables, and in the states of optimizers that are watched."""
        states = (state.views for state in self._watched_states)
        self._filled = [*self._others, *itertools.chain.from_iterable(states)]
        self._contents = [*itertools.chain.from_iterable(self._filled), *END]

    def _bind_tensors(self) -> None:
        self._parameters = self._reachable.parameters()
        tensors = [*self._everything, *self._parameters]
        tensors += itertools.chain.from_iterable(values for _, _, values in self._groups)
        self._seen_by_autograd = [t for t in tensors if isinstance(t, XLATensor)]
        self._flags: list[bool | None] = list(map(_REQUIRES_GRAD, self._seen_by_autograd))
        self._left_flags: list[tuple[XLATensor, bool]] = []
        self._switched: list[ForeignObject] = []
        self._modes: list[bool] = []
        self._flags_set = Replacements.flags
        tensors += itertools.chain.from_iterable(
            _OptimizerState(o).values for o in self._optimizers
        )
        self._tensors = [t for t in tensors if isinstance(t, XLATensor)]
        self._storages = [t._s for t in self._tensors]
        self._replacements = Replacements.count

    def watch_optimizers(
        self, stepped: Sequence[torch.optim.Optimizer], storages: Set[int]
    ) -> None:
        """Check what optimizers keep: those in ``stepped``, and those that keep a storage with one of these ids."""
        known = set(map(id, self._optimizers))
        self._optimizers += [o for o in dict.fromkeys(stepped) if id(o) not in known]
        self._states = [o.state for o in self._optimizers]
        for optimizer in self._optimizers:
            state = _OptimizerState(optimizer)
            if optimizer in stepped or state.has(storages):
                self._watched_states.append(state)
        self._bind_views()

    def leave_flags(self, flagged: Set[int]) -> None:
        """Do not check ``requires_grad`` of tensors with these ids; ``set_flags`` gives them their present one.

        It is for the caller to make sure that it is what it was before the recorded calls.
        """
        left = {id(t): t for t in self._seen_by_autograd if id(t) in flagged}
        self._left_flags = [(t, t.requires_grad) for t in left.values()]
        checked = zip(self._seen_by_autograd, self._flags, strict=True)
        self._flags = [None if id(t) in left else flag for t, flag in checked]

    def leave_modes(self, former: Sequence[_Mode], latter: Sequence[_Mode]) -> None:
        """Let ``set_flags`` leave modules in the modes in which two calls left them.

        Raises CaptureError if these differ, or if the latter's are not known, as its code showed only while it ran
        what it may switch. It is for the caller to make sure that modes are what they were before the latter call.
        """
        olds, news = ({id(module): mode for module, _, mode in seen} for seen in (former, latter))
        self._switched = self._modules if self._reachable.sets_modes else []
        for module in self._switched:
            old, new = olds.get(id(module)), news.get(id(module))
            if new is None or (old is not None and old is not new):
                what = f"the mode of {type(module).__name__} (training)"
                raise refuse(errors.MSG_SIDE_EFFECT, name=self._name, what=what, old=old, new=new)
        self._modes = [news[id(module)] for module in self._switched]

    def set_flags(self) -> None:
        """Set ``requires_grad`` of tensors, and ``training`` of modules, as the step does."""
        for t, wanted in self._left_flags:
            if t.requires_grad is not wanted:
                t.requires_grad_(wanted)
        if self._switched and list(map(TRAINING, self._switched)) != self._modes:
            for module, mode in zip(self._switched, self._modes, strict=True):
                module.training = mode

    def versioned(self) -> list[XLATensor]:
        """The tensors that autograd may have saved: all reachable ones except optimizers' state."""
        return self._seen_by_autograd

    def storages(self) -> list[Storage]:
        """The storages of all reachable tensors."""
        return self._storages

    def parameters(self) -> list[Operand]:
        """The reachable parameters."""
        return self._parameters

    def _hooks_now(self) -> list[tuple[object, ...]]:
        optimizers = self._reachable.optimizers.values()
        return module_tables.hook_tables(self._modules, optimizers, self._parameters)

    def check(self) -> None:
        """Raise CaptureError if something has changed since the recording."""
        for look_up, slots, values in self._groups:
            try:
                changed = any(map(_IS_NOT, look_up(), values))
            except (AttributeError, LookupError, ValueError):  # one is no longer there
                changed = True
            if changed:
                self._check_slots(slots, values)
        if (written := self._host.changed()) is not None:
            raise refuse(errors.MSG_HOST_CHANGED, name=self._name, what=written)
        contents = itertools.chain(itertools.chain.from_iterable(self._filled), END)
        if (
            any(self._empty)
            or sum(map(len, self._known)) != self._lengths
            or any(map(_IS_NOT, contents, self._contents))
        ):
            self._check_tables()
            self._check_states()
        if module_tables.hooks_registered() != self._registered:
            self._check_hooks()
        if Replacements.count != self._replacements:
            self._check_storages()
        if Replacements.flags != self._flags_set:
            self._check_flags()
        # classes are equal only if they are identical
        if list(map(type, self._modules)) != self._kinds:
            self._check_kinds()
        if (shadowing := self._attributes.shadowing()) is not None:
            raise self._differs(*shadowing)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            if optimizer.state is not state:
                raise refuse(
                    errors.MSG_REPLACED,
                    name=self._name,
                    what=f"the state of {type(optimizer).__name__}",
                )

    def _check_slots(self, slots: Sequence[Slot], values: list[Operand]) -> None:
        for number, (slot, old) in enumerate(zip(slots, values, strict=True)):
            new = slot.value()
            if isinstance(old, torch.Tensor):
                if new is not old:
                    raise refuse(errors.MSG_REPLACED, name=self._name, what=slot.path)
            elif new is not old and not (is_constant(old) and is_constant(new)):
                kind = type(old).__name__
                raise refuse(errors.MSG_OTHER_OBJECT, name=self._name, what=slot.path, kind=kind)
            elif not is_same(old, new):
                raise refuse(
                    errors.MSG_CHANGED,
                    name=self._name,
                    what=slot.path,
                    old=repr(old),
                    new=repr(new),
                )
            values[number] = new

    def _check_states(self) -> None:
        now = [_OptimizerState(watched.optimizer) for watched in self._watched_states]
        for watched, state in zip(self._watched_states, now, strict=True):
            if not state.is_like(watched):
                kind = type(state.optimizer).__name__
                raise refuse(errors.MSG_STATE, name=self._name, optimizer=kind)
        self._watched_states = now
        self._bind_views()

    def _check_tables(self) -> None:
        expected = iter(self._everything)
        for path, module in self._reachable.modules.values():
            tables = (*module_tables.tensor_tables(module), module_tables.submodules(module))
            for table in tables:
                for key, value in table.items():
                    if next(expected, None) is not value:
                        raise self._differs(f"{path}.{key}", value)
        if next(expected, END) is not END:
            what, old, new = "a module", "whole", "missing a part"
            raise refuse(errors.MSG_CHANGED, name=self._name, what=what, old=old, new=new)

    def _differs(self, what: str, value: Operand) -> errors.CaptureError:
        """The error for an attribute, or a part of a module, that has another ``value``."""
        if isinstance(value, torch.Tensor):
            return refuse(errors.MSG_REPLACED, name=self._name, what=what)
        old, new = "something else, or nothing,", f"a {type(value).__name__}"
        return refuse(errors.MSG_CHANGED, name=self._name, what=what, old=old, new=new)

    def _check_kinds(self) -> None:
        for (path, module), kind in zip(self._reachable.modules.values(), self._kinds, strict=True):
            if type(module) is not kind:
                old, new = kind.__name__, type(module).__name__
                what = f"the class of {path}"
                raise refuse(errors.MSG_CHANGED, name=self._name, what=what, old=old, new=new)

    def _check_hooks(self) -> None:
        if self._hooks_now() != self._hooks:
            names = ", ".join(path for path, _ in self._reachable.roots) or "an optimizer"
            raise refuse(errors.MSG_HOOKS, name=self._name, what=names)
        self._registered = module_tables.hooks_registered()

    def _check_storages(self) -> None:
        for t, s in zip(self._tensors, self._storages, strict=True):
            if t._s is not s:
                raise refuse(errors.MSG_REPLACED, name=self._name, what=self._path_of(t))
        self._replacements = Replacements.count

    def _check_flags(self) -> None:
        for t, old in zip(self._seen_by_autograd, self._flags, strict=True):
            if old is not None and t.requires_grad is not old:
                what = f"{self._path_of(t)}.requires_grad"
                raise refuse(errors.MSG_CHANGED, name=self._name, what=what, old=old, new=not old)
        self._flags_set = Replacements.flags

    def _path_of(self, tensor: Operand) -> str:
        for path, module in self._reachable.modules.values():
            for table in module_tables.tensor_tables(module):
                for key, value in table.items():
                    if value is tensor:
                        return f"{path}.{key}"
        for slot in self._reachable.slots:
            if slot.value() is tensor:
                return slot.path
        return f"a tensor of shape {tuple(tensor.shape)}"
