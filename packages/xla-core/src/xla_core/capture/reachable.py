"""Finds what a function can reach: the modules, optimizers, schedulers, tensors and numbers that its code names.

A replay does not run the function's Python code, so everything that the code reads must be unchanged. The names are
those in the code of the function, of the functions that it calls, and of its modules' methods, on lines that former
calls have run. An attribute that these do not name (a trainer's ``epoch``) may change.
"""

from __future__ import annotations

import array
import contextvars
import functools
import inspect
import operator
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Final

import numpy as np
import torch

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.executed_code import (
    FOREIGN,
    ExecutedCode,
    Lines,
    function_of,
    globals_in,
    imports_in,
    looks_up,
    names_in,
    parts_in,
    root,
)
from xla_core.capture.slots import (
    NUMBERS,
    Attribute,
    Contents,
    Current,
    OptimizerReads,
    Slot,
    in_slots,
    is_source,
    named,
    of_classes,
    slot_of_item,
)
from xla_core.contract.foreign_values import ForeignObject
from xla_core.torch_bridge import module_tables
from xla_core.torch_bridge.operands import Operand

# The objects of these packages are not searched, as they belong to the recording of a step.
_OWN: Final = frozenset({"xla_core", "xla_dist", "xla_spmd", "xla_debug"})
# Methods that a step is taken not to call, if it is not known what code it ran.
_NEVER_CALLED: Final = frozenset({
    "__init__", "__repr__", "extra_repr", "reset_parameters", "__setstate__", "__getstate__",
})  # fmt: skip
_MOST: Final = 1_000_000
# The most objects that are searched though no code names them (such as a data set); code may reach them otherwise.
_MOST_UNNAMED: Final = 20_000
_WRITABLE: Final = (torch.Tensor, np.ndarray)
# The objects of these packages may change without an effect on a step.
_OPAQUE: Final = frozenset({
    "logging", "threading", "weakref", "warnings", "importlib", "concurrent", "multiprocessing", "queue",
    "contextvars",
})  # fmt: skip


class _Names(set[str]):
    """Names in code.

    If code computes names, what begins or ends with the texts from which it builds them counts, too, and so do
    texts that code can reach.
    """

    def __init__(self, names: Set[str]) -> None:
        super().__init__(names)
        self._looks_up = False
        self._beginnings: tuple[str, ...] = ()
        self._ends: tuple[str, ...] = ()
        self._texts: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str)
            and (name.startswith(self._beginnings) or name.endswith(self._ends))
        )

    def add_computed(self, code: types.CodeType, lines: Lines) -> None:
        """Add the names that code may compute."""
        if looks_up(code, lines):
            self._looks_up = True
            self.update(self._texts)
            beginnings, ends = parts_in(code, lines)
            self._beginnings += tuple(beginnings)
            self._ends += tuple(ends)

    def add_texts(self, texts: Set[str]) -> bool:
        """Add texts that code can reach; returns whether there are more names now."""
        before = len(self)
        (self if self._looks_up else self._texts).update(texts)
        return len(self) > before


class Reachable:
    """What functions and objects can reach; ``slots`` contain tensors, numbers and containers."""

    def __init__(self, code: ExecutedCode | None = None) -> None:
        self._code = code if code is not None and code.ran else None
        self._everything = self._code is None
        self.slots: list[Slot] = []
        # items of what no code names
        self._unnamed: list[Slot] = []
        self.roots: list[tuple[str, torch.nn.Module]] = []
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.schedulers: dict[int, object] = {}
        # iterators, and random generators of the host
        self.sources: list[object] = []
        # paths, attributes and classes of what may get an attribute in place of one of its class
        self.owners: list[tuple[str, dict[str, object], type]] = []
        self._seen: set[int] = set()
        self._keep: list[object] = []
        self._names = _Names({"forward"})  # torch's code names it
        self._methods: set[tuple[type, str]] = set()
        self._objects: list[tuple[str, Mapping[str, object]]] = []
        self._of_optimizers = OptimizerReads()
        self._containers: list[tuple[str, ForeignObject, bool]] = []
        # attributes of objects: code reads them by name, also if they are in a class, too (accelerate's states)
        self._tables: set[int] = set()
        self._is_named = True
        self._classes: list[tuple[str, object]] = []
        self._attributes: list[tuple[str, str, object]] = []
        self._of_modules: list[tuple[str, str, object]] = []
        self._most = _MOST

    @classmethod
    def of(
        cls, function: object, arguments: Mapping[str, Operand], code: ExecutedCode | None = None
    ) -> Reachable:
        """What ``function`` can reach by itself, and through the objects in ``arguments`` by name.

        Code that is not in ``code`` is left out (default: all code counts).
        """
        reachable = cls(code)
        reachable._visit(getattr(function, "__name__", "the function"), function)
        for path, value in arguments.items():
            reachable._visit(path, value)
        reachable._follow(getattr(function, "__qualname__", None) or type(function).__name__)
        reachable._finish()
        return reachable

    def names(self, attribute: str) -> bool:
        """Whether some code names an attribute."""
        return attribute in self._names

    @property
    def sets_modes(self) -> bool:
        """Whether some code may switch modules between training and evaluation."""
        return self.names("train") or self.names("eval")

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of modules and optimizers, and other tensors that may have gradients, each once."""
        by_id = {
            id(p): p
            for _, m in self.modules.values()
            for p in module_tables.tensor_tables(m)[0].values()
            if p is not None
        }
        values = (slot.value() for slot in (*self.slots, *self._unnamed))
        leaves = (
            t for t in values if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf
        )
        by_id.update((id(t), t) for t in leaves)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                by_id.update((id(p), p) for p in group["params"])
        return list(by_id.values())

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are reached, each once: parameters, buffers, and those in slots."""
        tables = (t for _, m in self.modules.values() for t in module_tables.tensor_tables(m))
        values = (
            *self.parameters(),
            *(value for table in tables for value in table.values()),
            *(slot.value() for slot in (*self.slots, *self._unnamed)),
        )
        return list({id(t): t for t in values if isinstance(t, torch.Tensor)}.values())

    def tensors_of_modules(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers of the modules whose code may run, by path."""
        for path, module in self.modules.values():
            forward = function_of(type(module).forward)
            if forward is None or self._runs(forward.__code__):
                for table in module_tables.tensor_tables(module):
                    yield from ((f"{path}.{k}", t) for k, t in table.items() if t is not None)

    # -- walking -------------------------------------------------------------------------------

    def _follow(self, name: str) -> None:
        """Visit attributes: first those that some code names, then a limited number of others.

        Raises CaptureError if too many are named.
        """
        while (named := _taken(self._attributes, self._names)) or self._add_keys():
            for path, _, item in named:
                self._visit(path, item)
        if len(self._seen) > self._most:
            raise refuse(errors.MSG_REACHES, name=name, most=_MOST)
        self._most = len(self._seen) + _MOST_UNNAMED
        while named := (
            _taken(self._attributes, self._names)
            or _taken(self._of_modules, self._names)
            or _taken(self._attributes, None)
        ):
            for path, name, item in named:
                self._is_named = name in self._names
                self._visit(path, item)

    def _add_keys(self) -> bool:
        """Let keys of dictionaries count as texts that code can reach; returns whether there are more names now."""
        tables = (v for _, v, is_named in self._containers if is_named and isinstance(v, dict))
        keys = {k for t in tables if id(t) not in self._tables for k in t if isinstance(k, str)}
        return self._names.add_texts(keys)

    def _visit(self, path: str, value: Operand) -> None:
        if isinstance(value, str) and self._is_named:
            self._names.add_texts({value})
        if id(value) in self._seen or len(self._seen) > self._most or isinstance(value, NUMBERS):
            return
        if isinstance(value, torch.Tensor):
            return
        self._seen.add(id(value))
        self._keep.append(value)
        if isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif module_tables.is_optimizer(value):
            self._optimizer(path, value)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self.schedulers[id(value)] = value
            self._of_optimizers.schedulers.append((path, value))
            self._visit(f"{path}.optimizer", value.optimizer)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._visit(path, value.__func__)
            self._visit("self", value.__self__)
        elif isinstance(value, (list, tuple, deque)):
            for i, item in enumerate(value):
                self._visit(f"{path}[{i}]", item)
            self._containers.append((path, value, self._is_named))
        elif isinstance(value, dict):
            for key, item in value.items():
                self._visit(f"{path}[{key!r}]", item)
            self._containers.append((path, value, self._is_named))
        elif isinstance(value, (set, frozenset, bytearray, memoryview, array.array)):
            for item in value if isinstance(value, (set, frozenset)) else ():
                self._visit(f"an item of {path}", item)
            if self._is_named:
                self.slots.append(Contents(path, value, None))
        else:
            self._other(path, value)

    def _other(self, path: str, value: Operand) -> None:
        inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None)
        if callable(inner):
            self._visit(path, inner)
        if is_source(value):
            self.sources.append(value)
        if isinstance(value, operator.attrgetter):
            self._names.update(name for path in value.__reduce__()[1] for name in path.split("."))
        if isinstance(value, contextvars.ContextVar):
            self.slots.append(Current(path, value, None))
            self._visit(path, value.get(None))
        if isinstance(value, weakref.ref):
            self._visit(path, value())
        if isinstance(value, types.BuiltinMethodType):
            self._visit("self", value.__self__)
        if isinstance(value, functools.partial):
            self._visit(f"{path}.args", value.args)
            self._visit(f"{path}.keywords", value.keywords)
        kind = type(value)
        if isinstance(value, types.ModuleType):
            if root(value.__name__) not in FOREIGN:
                self._objects.append((path, vars(value)))
                self._of_modules += (
                    (f"{path}.{k}", k, one) for k, one in list(vars(value).items())
                )
            return
        if isinstance(value, type):
            self._class(path, value)
            self._class(path, kind)
            self._classes.append((path, value))
            return
        if root(kind.__module__) in {"builtins", *_OWN, *_OPAQUE}:
            return
        if root(kind.__module__) not in FOREIGN:
            self._class(path, kind)
            self._classes.append((path, value))
            self._attributes += ((f"{path}.{k}", k, item) for k, item in in_slots(value))
            if self._is_named and hasattr(value, "__dict__"):
                self._own(path, value)
        elif root(kind.__module__) in sys.stdlib_module_names:
            self._class(path, kind)  # such as ChainMap, whose code reads what it has in attributes
        if hasattr(value, "__dict__"):
            self._attributes += ((f"{path}.{k}", k, item) for k, item in list(vars(value).items()))
            self._objects.append((path, vars(value)))
            if vars(value) is not value:
                self._tables.add(id(vars(value)))

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Watch an optimizer; of one that is not torch's, the attributes that its code names, too."""
        self.optimizers[id(optimizer)] = optimizer
        self._of_optimizers.optimizers.append((path, optimizer))
        self._own(path, optimizer)
        kind = type(optimizer)
        if root(kind.__module__) in FOREIGN:
            return
        outer, self._of_optimizers.is_inside = self._of_optimizers.is_inside, True
        self._class(path, kind)
        self._of_optimizers.is_inside = outer
        self._classes.append((path, optimizer))
        own = module_tables.own_attributes(optimizer)
        self._attributes += ((f"{path}.{k}", k, vars(optimizer)[k]) for k in own)

    def _own(self, path: str, value: object) -> None:
        """Watch an object's own functions in place of its class's; those that are there are visited."""
        kind, table = type(value), vars(value)
        self.owners.append((path, table, kind))
        for key, item in list(table.items()):
            if _has_function(kind, key) and not is_equivalent(item):
                self._attributes.append((f"{path}.{key}", key, item))

    def calls(self, kind: type, attribute: str) -> bool:
        """Whether some code may call this attribute of objects of a class."""
        return self.names(attribute) and _has_function(kind, attribute)

    def _lines(self) -> Lines:
        """The lines that a step may run; empty if all may be run."""
        return {} if self._code is None or self._everything else self._code.lines

    def _runs(self, code: types.CodeType, name: str = "") -> bool:
        """Whether a step may run the code of a function (``name``: of a method)."""
        if self._code is None or self._everything:
            return name not in _NEVER_CALLED
        return code in self._code.ran or code in self._code.elsewhere

    def _class(self, path: str, kind: type) -> None:
        """Visit the methods of a class."""
        for base in kind.__mro__:
            if base is object or base is torch.nn.Module:
                continue
            foreign = root(base.__module__) in FOREIGN
            for name, member in list(vars(base).items()):
                function = function_of(member)
                if function is None:
                    if not foreign:
                        self._attributes.append((f"{path}.{name}", name, member))
                elif self._runs(function.__code__, name):
                    self._names |= names_in(function.__code__, self._lines())
                    if (base, name) not in self._methods:
                        self._methods.add((base, name))
                        self.slots.append(Slot(f"{path}.{name}", vars(base), name))
                    if not foreign:
                        self._visit(f"{path}.{name}", function)

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self.roots.append((path, module))
        for name, inner in module.named_modules(remove_duplicate=True):
            if id(inner) in self.modules:
                continue
            where = f"{path}.{name}" if name else path
            self.modules[id(inner)] = where, inner
            self._seen.add(id(inner))
            self._class(where, type(inner))
            self._own(where, inner)
            if root(type(inner).__module__) not in FOREIGN:
                self._classes.append((where, inner))
                for key, item in list(vars(inner).items()):
                    if not key.startswith("_") or not hasattr(torch.nn.Module, key):
                        self._attributes.append((f"{where}.{key}", key, item))

    def _function(self, path: str, function: types.FunctionType) -> None:
        if root(function.__module__ or "") in FOREIGN and not _is_wrapper(function):
            return
        code = function.__code__
        if not self._runs(code):
            self._seen.discard(id(function))  # it may be reached from code of which all counts
            return
        everything = self._everything
        # of what another thread ran, it is not known what it had called
        self._everything |= self._is_elsewhere(code)
        lines = self._lines()
        names = names_in(code, lines)
        self._names |= names
        self._names.add_computed(code, lines)
        self._of_optimizers.note(names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._add(name, cell, None)
        for name in globals_in(code, lines) & function.__globals__.keys():
            self._add(name, function.__globals__, name)
        package = function.__globals__.get("__package__") or ""
        for name in filter(sys.modules.__contains__, imports_in(code, package, lines)):
            self._visit(name, sys.modules[name])
        for name in function.__kwdefaults__ or ():
            self._add(f"{path}.{name}", function.__kwdefaults__, name)
        for value in function.__defaults__ or ():
            self._visit(path, value)
        inner = getattr(function, "__wrapped__", None)
        if inspect.isfunction(inner):
            self._visit(path, inner)
        self._everything = everything

    def _is_elsewhere(self, code: types.CodeType) -> bool:
        """Whether another thread ran a code, or one that is defined in it, such as a hook."""
        if self._code is None or not self._code.elsewhere:
            return False
        inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
        return code in self._code.elsewhere or any(map(self._is_elsewhere, inner))

    def _add(self, path: str, mapping: object, key: object) -> None:
        slot = Slot(path, mapping, key)
        value = slot.value()
        if value is slot or (
            isinstance(value, types.ModuleType) and root(value.__name__) in FOREIGN
        ):
            return
        self.slots.append(slot)
        self._visit(path, value)

    def _finish(self) -> None:
        """Slots of the attributes and items of objects, now that all names are known."""
        names = self._names
        for path, module in self.modules.values():
            for key in named(names, vars(module)):
                if key != "training" or not self.sets_modes:
                    self.slots.append(Slot(f"{path}.{key}", vars(module), key))
        for path, value, is_named in self._containers:
            if id(value) in self._tables:
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            slots = self.slots if is_named else self._unnamed
            for key, item in list(items):
                if isinstance(item, _WRITABLE) or (is_named and not isinstance(value, tuple)):
                    slots.append(slot_of_item(f"{path}[{key!r}]", value, key))
        for path, table, kind in self.owners:
            for key in filter(functools.partial(self.calls, kind), table):
                self.slots.append(Slot(f"{path}.{key}", table, key))
        for path, attributes in self._objects:
            for key in named(names, attributes):
                self.slots.append(Slot(f"{path}.{key}", attributes, key))
        self.slots += self._of_optimizers.slots(names)
        if not names.isdisjoint(("environ", "getenv")):
            for key in named(names, os.environ):
                self.slots.append(Slot(f"os.environ[{key!r}]", os.environ, key))
        for path, value in self._classes:
            for key in of_classes(names, value):
                self.slots.append(Attribute(f"{path}.{key}", value, key))
        # the walk must not keep objects alive that the step replaces
        self._objects.clear()
        self._containers.clear()
        self._tables.clear()
        self._classes.clear()
        self._attributes.clear()
        self._of_modules.clear()
        self._keep.clear()
        self._seen.clear()


def _taken(
    pending: list[tuple[str, str, object]], names: set[str] | None
) -> list[tuple[str, str, object]]:
    """Those of the ``pending`` attributes that are named (default: all), which no longer are pending."""
    taken = [one for one in pending if names is None or one[1] in names]
    if taken:
        pending[:] = () if names is None else [one for one in pending if one[1] not in names]
    return taken


def _has_function(kind: type, name: str) -> bool:
    """Whether objects of a class have a function of this name from it."""
    for base in kind.__mro__:
        if name in vars(base):
            return callable(vars(base)[name]) or isinstance(vars(base)[name], classmethod)
    return False


def is_equivalent(item: Operand) -> bool:
    """Whether an object's own function does what its class's does: one of this project's, or a scheduler's."""
    own = root(getattr(item, "__module__", None)) in _OWN
    return own or module_tables.is_schedulers_wrapper(item)


def _is_wrapper(function: Callable[..., object]) -> bool:
    return hasattr(function, "__wrapped__")
