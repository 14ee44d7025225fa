"""Helpers for state dicts: flattening, parts of tensors, and plans that write each part once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from xla_core.contract.foreign_values import ForeignObject

Path = tuple[int | str, ...]

StateValue: TypeAlias = ForeignObject
"""A value in a state dict: a tensor, a number, any object that can be pickled, or a dict or list of these."""

StateDict: TypeAlias = dict[str, StateValue]
"""The state of a module, an optimizer, a loader or a whole run, by name."""


def flatten_state_dict(
    state_dict: Mapping[str, StateValue],
) -> tuple[dict[str, object], dict[str, Path]]:
    """The values of nested dicts and lists under keys such as ``model.layer.0``, and the path of each key.

    Lists and tuples without tensors or dicts in them count as values. Raises ValueError if two paths have the same
    key.
    """
    flat: StateDict = {}
    paths: dict[str, Path] = {}

    def visit(path: Path, value: StateValue) -> None:
        if isinstance(value, Mapping):
            items: StateValue = value.items()
        elif _is_container(value):
            items = enumerate(value)
        else:
            key = ".".join(map(str, path))
            if key in flat:
                raise ValueError(
                    f"the keys {paths[key]} and {path} of the state dict are both {key!r}"
                )
            flat[key], paths[key] = value, path
            return
        for name, item in items:
            visit((*path, name), item)

    visit((), state_dict)
    return flat, paths


def _is_container(value: object) -> bool:
    """Whether a value is a list or tuple with a tensor or dict in it, which is saved under its own key."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, (torch.Tensor, Mapping)) or _is_container(item) for item in value
    )


def set_element(root_dict: StateDict, path: Sequence[int | str], value: StateValue) -> None:
    """Store ``value`` in ``root_dict`` at ``path``; create missing dicts (for names) and lists (for numbers)."""
    place: StateValue = root_dict
    for key, following in itertools.pairwise(path):
        missing: object = [] if isinstance(following, int) else {}
        place = _at(place, key, missing)
    _at(place, path[-1], None)
    place[path[-1]] = value


def _at(place: StateValue, key: int | str, missing: StateValue) -> StateValue:
    """The item at ``key``, which is set to ``missing`` if there is none; a list is extended if it is too short."""
    if isinstance(place, list):
        assert isinstance(key, int)
        place.extend([None] * (key + 1 - len(place)))
        if place[key] is None:
            place[key] = missing
        return place[key]
    return place.setdefault(key, missing)


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The view of ``tensor`` that begins at ``offsets`` and has shape ``sizes``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Plans in which each part of a tensor is written only by the first process whose plan has it."""
    seen: set[MetadataIndex] = set()
    deduplicated = []
    for plan in all_plans:
        items = [item for item in plan.items if item.index not in seen]
        seen.update(item.index for item in items)
        deduplicated.append(dataclasses.replace(plan, items=items))
    return deduplicated
