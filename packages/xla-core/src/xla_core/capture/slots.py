"""Places that hold something a step may read, and what code reads of optimizers and schedulers."""

from __future__ import annotations

import contextvars
import enum
import itertools
import operator
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
import torch

from xla_core.capture.executed_code import FOREIGN, root
from xla_core.contract.foreign_values import ForeignObject
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge import module_tables
from xla_core.torch_bridge.operands import Operand

NUMBERS: Final = (bool, int, float, str, type(None))
_CONSTANTS: Final = (*NUMBERS, complex, bytes, range, torch.device, np.generic, enum.Enum)
_CONTAINERS: Final[tuple[type[ForeignObject], ...]] = dict, list, tuple, deque
_LOOK_UPS: Final = frozenset(kind.__getitem__ for kind in _CONTAINERS)
_MOST_ITEMS: Final = 1 << 12
_SCHEDULED: Final = frozenset({"lr", "momentum", "betas"})
_COUNTED: Final = frozenset({"last_epoch", "_step_count"})


class Slot:
    """A place that holds something a step may read: ``mapping[key]``, or a closure's cell."""

    __slots__ = ("path", "mapping", "key")

    def __init__(self, path: str, mapping: ForeignObject, key: object) -> None:
        self.path = path
        self.mapping = mapping
        self.key = key

    def value(self) -> object:
        """The present content; the slot itself if it is empty."""
        if isinstance(self.mapping, types.CellType):
            try:
                return self.mapping.cell_contents
            except ValueError:
                return self
        try:
            return self.mapping[self.key]
        except (KeyError, IndexError):
            return self


class Attribute(Slot):
    """An attribute that is in a class, or in a slot of an instance; an instance may get one of its own later."""

    __slots__ = ()
    key: str

    def value(self) -> object:
        """The present content; the slot itself if it is empty."""
        return getattr(self.mapping, self.key, self)


class Made(Slot):
    """An item of a container from which each look-up makes another object; what the container holds is watched."""

    __slots__ = ()

    @property
    def look_up(self) -> Callable[[ForeignObject, object], object]:
        """The function that returns what the container holds for a key."""
        look_ups = (k.__getitem__ for k in _CONTAINERS if isinstance(self.mapping, k))
        return next(look_ups)

    def value(self) -> object:
        """What the container holds; the slot itself if there is no such item."""
        try:
            return self.look_up(self.mapping, self.key)
        except LookupError:
            return self


class Current(Made):
    """The present value of a context variable; None if it has none."""

    __slots__ = ()

    @property
    def look_up(self) -> Callable[[ForeignObject, object], object]:
        """The function that returns the value."""
        return contextvars.ContextVar.get


class Contents(Slot):
    """What a set, or a sequence of bytes or of numbers of one kind, contains; only how much, if that is a lot."""

    __slots__ = ()

    def value(self) -> object:
        """The present contents; of objects, their ids."""
        if isinstance(self.mapping, memoryview):
            size = self.mapping.nbytes
            return size if size > _MOST_ITEMS else self.mapping.tobytes()
        if len(self.mapping) > _MOST_ITEMS:
            return len(self.mapping)
        items = tuple(self.mapping)
        return items if is_constant(items) else tuple(map(id, items))


class Rate(Slot):
    """A number in an optimizer's group that schedules change, or one of a schedule that counts its steps."""

    __slots__ = ()


class Rates(Rate):
    """The list of rates of a schedule, which puts another list in its place in each step."""

    __slots__ = ()

    def value(self) -> object:
        """The present rates; the slot itself if there is no list."""
        try:
            return tuple(self.mapping[self.key])
        except KeyError:
            return self


_ITERATED: Final[tuple[ForeignObject, ...]] = (
    (), [], range(0), "", b"", set(), {}, {}.items(), {}.values(),
)  # fmt: skip


def _position_of_frame(generator: types.GeneratorType[object, object, object]) -> object:
    frame = generator.gi_frame
    return frame and (frame.f_lasti, [v for v in frame.f_locals.values() if is_constant(v)])


# How far iterators and random generators of the host have come, by their types; the first that fits counts. What
# the operating system draws has no state.
_POSITIONS: Final[dict[type, Callable[[ForeignObject], object]]] = {
    **dict.fromkeys((type(iter(one)) for one in _ITERATED), operator.length_hint),
    itertools.count: repr,
    types.GeneratorType: _position_of_frame,
    random.SystemRandom: lambda _: None,
    random.Random: random.Random.getstate,
    np.random.Generator: lambda one: pickle.dumps(one.bit_generator.state),
    np.random.RandomState: lambda one: pickle.dumps(one.get_state()),
    torch.Generator: lambda one: one.get_state().cpu().numpy().tobytes(),
}
_SOURCES: Final = tuple(_POSITIONS)


def is_source(value: Operand) -> bool:
    """Whether each look at a value gives another one: an iterator, or a random generator of the host."""
    return isinstance(value, _SOURCES)


def position_of(source: ForeignObject) -> object:
    """How far a source has come."""
    return next(f(source) for kind, f in _POSITIONS.items() if isinstance(source, kind))


def random_states_of_host() -> tuple[object, ...]:
    """The states of the random generators that Python, numpy and PyTorch have for the host."""
    of_numpy = pickle.dumps(np.random.get_state())
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()


class OptimizerReads:
    """What code reads of torch's optimizers and schedulers, which is not searched: a step changes it by itself.

    Code inside optimizers does not count: ``optimizer_steps`` knows what their steps read and change.
    """

    def __init__(self) -> None:
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.schedulers: list[tuple[str, ForeignObject]] = []
        self.is_inside = False
        self._names: set[str] = set()
        self._keys: dict[str, set[str]] = {"param_groups": set(), "state": set()}

    def note(self, names: set[str]) -> None:
        """Note the names and texts in a code."""
        if not self.is_inside:
            self._names |= names
            for attribute, keys in self._keys.items():
                if attribute in names:
                    keys |= names

    def slots(self, names: set[str]) -> Iterator[Slot]:
        """Named attributes, and entries whose key is a text in a code that names ``param_groups``, or ``state``."""
        for path, optimizer in self.optimizers:
            for key in filter(names.__contains__, module_tables.own_attributes(optimizer)):
                yield Slot(f"{path}.{key}", vars(optimizer), key)
            for number, group in enumerate(optimizer.param_groups):
                for key in named(self._keys["param_groups"] - {"params"}, group):
                    kind = Rate if key in _SCHEDULED else Slot
                    yield kind(f"{path}.param_groups[{number}][{key!r}]", group, key)
            for state in optimizer.state.values():
                for key in named(self._keys["state"], state if isinstance(state, dict) else {}):
                    if not isinstance(state[key], XLATensor):
                        yield Slot(f"{path}.state[...][{key!r}]", state, key)
        for path, scheduler in self.schedulers:
            for key in named(self._names, vars(scheduler)):
                if isinstance(vars(scheduler)[key], NUMBERS):
                    kind = Rate if key in _COUNTED else Slot
                    yield kind(f"{path}.{key}", vars(scheduler), key)
            if self._names & {"get_last_lr", "_last_lr"}:
                yield Rates(f"{path}.get_last_lr()", vars(scheduler), "_last_lr")


def named(names: set[str], attributes: Mapping[str, object]) -> Iterator[str]:
    """Attributes that some code names."""
    return (key for key in attributes if key in names)


def of_classes(names: set[str], value: object) -> Iterator[str]:
    """Attributes that some code names, and that an object, or a class, has from the user's classes."""
    own = () if isinstance(value, type) else getattr(value, "__dict__", ())
    kind = value if isinstance(value, type) else type(value)
    seen: set[str] = set()
    meta = type(kind) if isinstance(value, type) else object
    for base in (*kind.__mro__, *meta.__mro__):
        if root(base.__module__) in FOREIGN:
            continue
        for key, member in vars(base).items():
            if key not in names or key in seen or key in own or key.startswith("__"):
                continue
            seen.add(key)
            if isinstance(member, types.MemberDescriptorType) and not isinstance(value, type):
                member = getattr(value, key, None)
            # a descriptor makes a new object at each look-up; its function is watched, or runs no Python code
            if not hasattr(type(member), "__get__"):
                yield key


def in_slots(value: object) -> Iterator[tuple[str, object]]:
    """What an object has in ``__slots__`` of its classes, by name."""
    for base in type(value).__mro__:
        for key, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, key):
                yield key, getattr(value, key)


def slot_of_item(path: str, container: ForeignObject, key: object) -> Slot:
    """The slot of an item that a container has."""
    slot = Slot(path, container, key)
    if type(container).__getitem__ not in _LOOK_UPS:
        value = slot.value()
        if slot.value() is not value and not is_constant(value):
            return Made(path, container, key)
    return slot


def is_constant(value: Operand) -> bool:
    """Whether a value cannot change, so that any value with the same ``repr`` is equal to it."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return isinstance(value, _CONSTANTS)


def tables_of(value: Operand) -> list[ForeignObject]:
    """What slots look in to read parts of a value: itself, and its attributes."""
    attributes = getattr(value, "__dict__", None)
    return [value, attributes] if isinstance(attributes, dict) else [value]


def present(slot: Slot, replaced: dict[int, ForeignObject]) -> object:
    """What is in a slot now, or in the same place of what has replaced its object."""
    if id(slot.mapping) not in replaced:
        return slot.value()
    return type(slot)(slot.path, replaced[id(slot.mapping)], slot.key).value()


class _Length:
    """How many items a container has."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def summary_of(value: Operand) -> object:
    """What of a value may not change in a call: the value, how many items it has, or only its type."""
    if isinstance(value, (list, dict, deque, set)):
        return _Length(len(value))
    return value if isinstance(value, torch.Tensor) or is_constant(value) else type(value)


def is_same(old: Operand, new: Operand) -> bool:
    """Whether two values or summaries are equal; tensors, only if they are one object."""
    if old is new:
        return True
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    if isinstance(old, _Length) and isinstance(new, _Length):
        return old.count == new.count
    return type(old) is type(new) and repr(old) == repr(new)


def text_of(value: Operand) -> str:
    """A value or summary for an error's text."""
    return f"{value.count} items" if isinstance(value, _Length) else repr(value)
