"""What a function reaches: modules, optimizers, schedules, tensors and numbers that its code can name.

A replay runs none of the function's Python, so whatever the function would have looked at must be what it was.
Names are those in the code of the function, of what it calls, and of its modules' methods: an attribute that
none of them names (a trainer's ``epoch``) may change.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from xla_core.torch_bridge import module_tables
from xla_core.torch_bridge.operands import Operand

# Whose code is not looked into: it reads no state of the user's but through arguments.
_FOREIGN: Final = frozenset({
    "torch", "torch_xla", "xla_core", "xla_dist", "xla_spmd", "xla_debug", "numpy", "jax", "jaxlib",
    "builtins", "functools", "math", "itertools", "contextlib", "typing", "collections", "logging", "os",
})  # fmt: skip
# Whose objects are not looked into: they are part of how a step is recorded.
_OWN: Final = frozenset({"xla_core", "xla_dist", "xla_spmd", "xla_debug"})
# Methods of modules that no step calls.
_NEVER_CALLED: Final = frozenset({
    "__init__", "__repr__", "extra_repr", "reset_parameters", "__setstate__", "__getstate__",
})  # fmt: skip
_MOST: Final = 20_000
NUMBERS: Final = (bool, int, float, str, type(None))


class Slot:
    """A place that holds something a step may read: ``mapping[key]``, or a closure's cell."""

    __slots__ = ("path", "mapping", "key")

    def __init__(self, path: str, mapping: Any, key: Any) -> None:
        self.path = path
        self.mapping = mapping
        self.key = key

    def value(self) -> Any:
        """What is there now; the slot itself where there is nothing."""
        if isinstance(self.mapping, types.CellType):
            try:
                return self.mapping.cell_contents
            except ValueError:
                return self
        try:
            return self.mapping[self.key]
        except (KeyError, IndexError):
            return self


class Reachable:
    """What is reached from functions and objects; ``slots`` hold tensors, numbers and containers."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.roots: list[tuple[str, torch.nn.Module]] = []
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.schedulers: dict[int, object] = {}
        self._seen: set[int] = set()
        self._keep: list[object] = []
        self._names: set[str] = set()
        self._objects: list[tuple[str, object]] = []

    @classmethod
    def of(cls, function: Any, arguments: Mapping[str, Operand]) -> Reachable:
        """What ``function`` reaches by itself and through objects among its arguments, by name."""
        reachable = cls()
        reachable._visit(getattr(function, "__name__", "the function"), function)
        for path, value in arguments.items():
            reachable._visit(path, value)
        reachable._finish()
        return reachable

    def names(self, attribute: str) -> bool:
        """Whether some code names an attribute."""
        return attribute in self._names

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of modules and optimizers, and other tensors that may have gradients, each once."""
        by_id = {
            id(p): p
            for _, m in self.modules.values()
            for p in module_tables.tensor_tables(m)[0].values()
            if p is not None
        }
        values = (slot.value() for slot in self.slots)
        leaves = (
            t for t in values if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf
        )
        by_id.update((id(t), t) for t in leaves)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                by_id.update((id(p), p) for p in group["params"])
        return list(by_id.values())

    # -- walking -------------------------------------------------------------------------------

    def _visit(self, path: str, value: Operand) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST or isinstance(value, NUMBERS):
            return
        if isinstance(value, torch.Tensor):
            return
        self._seen.add(id(value))
        self._keep.append(value)
        if isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers[id(value)] = value
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self.schedulers[id(value)] = value
            self._visit(path, value.optimizer)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._visit(path, value.__func__)
            self._visit("self", value.__self__)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self._visit(f"{path}[{i}]", item)
            if isinstance(value, list):
                self._objects.append((path, value))
        elif isinstance(value, dict):
            for key, item in value.items():
                self._visit(f"{path}[{key!r}]", item)
            self._objects.append((path, value))
        else:
            self._other(path, value)

    def _other(self, path: str, value: Operand) -> None:
        inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None)
        if callable(inner):
            self._visit(path, inner)
        kind = type(value)
        if (
            isinstance(value, (type, types.BuiltinFunctionType))
            or _root(kind.__module__) == "builtins"
        ):
            if isinstance(value, types.ModuleType) and _root(value.__name__) not in _FOREIGN:
                self._objects.append((path, value))
            return
        if not hasattr(value, "__dict__") or _root(kind.__module__) in _OWN:
            return
        if _root(kind.__module__) not in _FOREIGN:
            self._class(path, kind)
        for name, item in list(vars(value).items()):
            self._visit(f"{path}.{name}", item)
        self._objects.append((path, value))

    def _class(self, path: str, kind: type) -> None:
        """The code of a class's methods."""
        for base in kind.__mro__:
            if base is object or base is torch.nn.Module:
                continue
            foreign = _root(base.__module__) in _FOREIGN
            for name, member in vars(base).items():
                if isinstance(member, types.FunctionType) and name not in _NEVER_CALLED:
                    self._names |= _names(member.__code__)
                    if not foreign:
                        self._visit(f"{path}.{name}", member)

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self.roots.append((path, module))
        for name, inner in module.named_modules(remove_duplicate=True):
            if id(inner) in self.modules:
                continue
            where = f"{path}.{name}" if name else path
            self.modules[id(inner)] = where, inner
            self._seen.add(id(inner))
            self._class(where, type(inner))
            if _root(type(inner).__module__) not in _FOREIGN:
                for key, item in list(vars(inner).items()):
                    if not key.startswith("_") or not hasattr(torch.nn.Module, key):
                        self._visit(f"{where}.{key}", item)

    def _function(self, path: str, function: types.FunctionType) -> None:
        if _root(function.__module__ or "") in _FOREIGN and not _is_wrapper(function):
            return
        code = function.__code__
        names = _names(code)
        self._names |= names
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._add(name, cell, None)
        for name in names & function.__globals__.keys():
            self._add(name, function.__globals__, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(path, value)
        inner = getattr(function, "__wrapped__", None)
        if inspect.isfunction(inner):
            self._visit(path, inner)

    def _add(self, path: str, mapping: object, key: object) -> None:
        slot = Slot(path, mapping, key)
        value = slot.value()
        if value is slot or (
            isinstance(value, types.ModuleType) and _root(value.__name__) in _FOREIGN
        ):
            return
        self.slots.append(slot)
        self._visit(path, value)

    def _finish(self) -> None:
        """Slots of the attributes and items of objects, now that all names are known."""
        names = self._names
        for path, module in self.modules.values():
            for key in _named(names, vars(module)):
                self.slots.append(Slot(f"{path}.{key}", vars(module), key))
        for path, value in self._objects:
            if isinstance(value, (list, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(items):
                    if isinstance(item, torch.Tensor | int | float):
                        self.slots.append(Slot(f"{path}[{key!r}]", value, key))
                continue
            for key in _named(names, vars(value)):
                self.slots.append(Slot(f"{path}.{key}", vars(value), key))
        # what the step replaces must not live on because of the walk
        self._objects.clear()
        self._keep.clear()
        self._seen.clear()


def _named(names: set[str], attributes: Mapping[str, Any]) -> Iterator[str]:
    """Attributes that some code names, and that hold something a step may read."""
    for key, value in attributes.items():
        if key in names and isinstance(value, (*NUMBERS, torch.Tensor, list, dict)):
            yield key


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_wrapper(function: Callable[..., object]) -> bool:
    return hasattr(function, "__wrapped__")


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
