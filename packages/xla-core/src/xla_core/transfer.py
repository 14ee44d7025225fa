"""Finds the tensors inside Python containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from xla_core.tensor import XLATensor


def map_tensors(data: Any, change: Callable[[XLATensor], Any]) -> Any:
    """A copy of ``data`` with ``change`` applied to each ``xla`` tensor.

    Goes through mappings, lists, tuples, named tuples, sets and dataclasses, and keeps their types;
    what holds no ``xla`` tensor is the same object.
    """
    if isinstance(data, XLATensor):
        return change(data)
    if isinstance(data, Mapping):
        changed = {k: map_tensors(v, change) for k, v in data.items()}
        return data if all(changed[k] is data[k] for k in changed) else _like(data, changed)
    if isinstance(data, (list, tuple, set, frozenset)):
        items = [map_tensors(item, change) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init}
        changed = {k: map_tensors(v, change) for k, v in fields.items()}
        return (
            data
            if all(changed[k] is fields[k] for k in fields)
            else dataclasses.replace(data, **changed)
        )
    return data


def _like(data: Any, changed: dict[Any, Any]) -> Any:
    made = type(data)(changed)
    # state_dict() keeps its version information in an attribute of the OrderedDict
    for name, value in getattr(data, "__dict__", {}).items():
        setattr(made, name, value)
    return made
