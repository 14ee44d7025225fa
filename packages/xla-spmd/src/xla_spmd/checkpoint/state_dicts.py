"""State dicts as flat mappings, parts of tensors, and plans without what is written twice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

Path = tuple[int | str, ...]

StateValue: TypeAlias = Any
"""What a state dict may hold: tensors, numbers, strings, what can be pickled, and dicts and lists of such."""

StateDict: TypeAlias = dict[str, StateValue]
"""The state of a module, an optimizer, a loader or a whole run, by name."""


def flatten_state_dict(
    state_dict: Mapping[str, StateValue],
) -> tuple[dict[str, object], dict[str, Path]]:
    """The values of nested dicts and lists under keys such as ``model.layer.0``, and each key's path.

    Lists and tuples without tensors or dicts in them are values. Raises ValueError when two paths make the
    same key.
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
    """Whether a list has something in it that is saved on its own."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, (torch.Tensor, Mapping)) or _is_container(item) for item in value
    )


def set_element(root_dict: StateDict, path: Sequence[int | str], value: StateValue) -> None:
    """Store ``value`` at ``path``, making dicts (for names) and lists (for numbers) on the way."""
    place: StateValue = root_dict
    for key, following in itertools.pairwise(path):
        missing: object = [] if isinstance(following, int) else {}
        place = _at(place, key, missing)
    _at(place, path[-1], None)
    place[path[-1]] = value


def _at(place: StateValue, key: int | str, missing: StateValue) -> StateValue:
    """What is at ``key``; ``missing`` is put there if nothing is. Lists are made long enough."""
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
    """The view of ``tensor`` that begins at ``offsets`` and has the shape ``sizes``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """The plans in which each part of a tensor is written by the first process that has it only."""
    seen: set[MetadataIndex] = set()
    kept = []
    for plan in all_plans:
        items = [item for item in plan.items if item.index not in seen]
        seen.update(item.index for item in items)
        kept.append(dataclasses.replace(plan, items=items))
    return kept
