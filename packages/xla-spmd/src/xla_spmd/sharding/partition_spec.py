"""Partition specs: the mesh axes over which each dimension of a tensor is split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from xla_spmd.sharding.hlo_sharding import Sharding, tiled

AxisName: TypeAlias = str | int
Spec: TypeAlias = Sequence[AxisName | tuple[AxisName, ...] | None]

MSG_UNKNOWN_NAME: Final = (
    "Axis name {name} is not defined in the given mesh, whose axes are {known}{suggestion}"
)
MSG_NO_NAMES: Final = (
    "Axis name {name} is not defined in the given mesh: it has no axis names. Use the numbers "
    "0..{last}, or give names: Mesh(device_ids, mesh_shape, axis_names=(...))"
)
MSG_UNKNOWN_INDEX: Final = (
    "axis {index} of the partition spec {spec} is not one of the mesh's {count} axes {known}"
)
MSG_NOT_AN_AXIS: Final = (
    "{entry!r} in the partition spec {spec} is not a mesh axis; each entry is a name, a number, a "
    "tuple of these, or None for a dimension that is not split"
)
MSG_TWICE: Final = (
    "the mesh axis {axis} occurs twice in the partition spec {spec}: an axis can split only one "
    "dimension. Keep it for the larger dimension and write None for the other"
)
MSG_RANK: Final = (
    "Partition spec length ({length}) should be equal to the input rank ({rank}). The tensor has "
    "shape {shape}; write one entry per dimension, None for one that is not split: {example}"
)


class PartitionSpecError(ValueError, AssertionError):
    """A partition spec that does not fit the mesh or the tensor.

    torch_xla raises ValueError for some of these mistakes and AssertionError for others; this is both.
    """


def axes_of(spec: Spec, names: Sequence[str] | None, count: int) -> list[tuple[int, ...]]:
    """For each dimension, the numbers of the mesh axes over which ``spec`` splits it.

    ``names`` are the names of the mesh's ``count`` axes, or None. Negative numbers in ``spec`` count from the end.
    Raises PartitionSpecError for an entry that is not an axis of the mesh, and for an axis that occurs twice.
    """
    axes = []
    seen: dict[int, AxisName] = {}
    for entry in spec:
        group = entry if isinstance(entry, (tuple, list)) else () if entry is None else (entry,)
        numbers = tuple(_axis(axis, spec, names, count) for axis in group)
        for number, axis in zip(numbers, group, strict=True):
            if number in seen:
                raise PartitionSpecError(MSG_TWICE.format(axis=repr(axis), spec=tuple(spec)))
            seen[number] = axis
        axes.append(numbers)
    return axes


def _axis(entry: AxisName, spec: Spec, names: Sequence[str] | None, count: int) -> int:
    if isinstance(entry, str):
        if not names:
            raise PartitionSpecError(MSG_NO_NAMES.format(name=entry, last=count - 1))
        if entry not in names:
            similar = [n for n in names if n.lower() == entry.lower()]
            text = MSG_UNKNOWN_NAME.format(
                name=entry,
                known=tuple(names),
                suggestion=f"; did you mean {similar[0]!r}?" if similar else "",
            )
            raise PartitionSpecError(text)
        return list(names).index(entry)
    if isinstance(entry, bool) or not isinstance(entry, (int, np.integer)):
        raise PartitionSpecError(MSG_NOT_AN_AXIS.format(entry=entry, spec=tuple(spec)))
    if not -count <= entry < count:
        known = tuple(names) if names else tuple(range(count))
        raise PartitionSpecError(
            MSG_UNKNOWN_INDEX.format(index=entry, spec=tuple(spec), count=count, known=known)
        )
    return int(entry) % count


def sharding_of(spec: Spec, grid: np.ndarray, names: Sequence[str] | None) -> Sharding:
    """The sharding that ``spec`` describes on a mesh with the devices in ``grid`` and axes called ``names``.

    Devices along axes that ``spec`` does not use hold copies of the same part (partial replication).
    """
    axes = axes_of(spec, names, grid.ndim)
    used = [axis for group in axes for axis in group]
    free = [axis for axis in range(grid.ndim) if axis not in used]
    tiles = [math.prod(grid.shape[axis] for axis in group) for group in axes]
    copies = math.prod(grid.shape[axis] for axis in free)
    return tiled(grid.transpose(used + free).reshape([*tiles, copies]), len(axes))


def check_rank(spec: Spec, shape: Sequence[int]) -> None:
    """Raise PartitionSpecError unless ``spec`` has one entry for each dimension of ``shape``."""
    if len(spec) != len(shape):
        example = (*spec, *[None] * len(shape))[: len(shape)]
        raise PartitionSpecError(
            MSG_RANK.format(
                length=len(spec), rank=len(shape), shape=tuple(shape), example=tuple(example)
            )
        )
