"""``OpSharding``: a sharding from torch_xla's lists of devices, and a mesh that lies as a sharding does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xla_core.extension_api import runtime
from xla_spmd.sharding.annotation import Annotation
from xla_spmd.sharding.hlo_sharding import (
    MANUAL,
    REPLICATED,
    Sharding,
    ShardingType,
    canonical,
    tiled,
)
from xla_spmd.sharding.mesh import Mesh

MSG_GROUPS: Final = (
    "OpSharding: replication_groups {groups} must be as many lists of one length as group_assignment "
    "{assignment} has numbers"
)
MSG_TYPE: Final = (
    "OpSharding: a sharding of type {type} cannot be made of lists; use TILED, PARTIAL, REPLICATED, MAXIMAL or "
    "MANUAL"
)
MSG_RANK: Final = "a sharding {text} of {parts} dimensions does not fit a tensor of shape {shape}"
MSG_DEVICES: Final = (
    "the sharding {text} is over {size} devices, this job has {count}: it names each of them once"
)


class _FromLists(type):
    """``OpSharding(...)`` makes a ``Sharding``, and every ``Sharding`` is an ``OpSharding``."""

    def __call__(
        cls,
        tile_assignment: Sequence[object],
        group_assignment: Sequence[object],
        replication_groups: Sequence[Sequence[int]],
        sharding_type: int,
    ) -> Any:
        return from_lists(tile_assignment, group_assignment, replication_groups, sharding_type)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Sharding)


class OpSharding(metaclass=_FromLists):
    """How one value is split: ``OpSharding(tile_assignment, group_assignment, replication_groups, type)``.

    ``tile_assignment`` is a nested list of device numbers, a dimension per one of the value. For PARTIAL it has
    one more, whose devices hold the same part, or ``group_assignment`` says which of
    ``replication_groups`` (lists of devices that do) is where. ``type`` is a ``ShardingType``'s number.
    """


def from_lists(
    tile_assignment: Sequence[object],
    group_assignment: Sequence[object],
    replication_groups: Sequence[Sequence[int]],
    sharding_type: int,
) -> Sharding:
    """See ``OpSharding``. Raises ValueError for another type, or groups that do not fit."""
    kind = ShardingType(int(sharding_type))
    if kind is ShardingType.REPLICATED:
        return REPLICATED
    if kind is ShardingType.MANUAL:
        return MANUAL
    devices = np.asarray(tile_assignment)
    if kind is ShardingType.MAXIMAL:
        return Sharding(kind, (), (int(devices.reshape(-1)[0]),))
    if kind is ShardingType.TILED:
        return tiled(devices, devices.ndim)
    if kind is not ShardingType.PARTIAL:
        raise ValueError(MSG_TYPE.format(type=kind.name))
    groups = np.asarray(group_assignment)
    if not groups.size:
        return tiled(devices, devices.ndim - 1)
    lengths = {len(group) for group in replication_groups}
    if len(lengths) != 1 or groups.size != len(replication_groups):
        text = MSG_GROUPS.format(groups=replication_groups, assignment=group_assignment)
        raise ValueError(text)
    members = np.asarray(replication_groups)[groups.reshape(-1)]
    return tiled(members.reshape(*groups.shape, -1), groups.ndim)


def annotation_by(sharding: Sharding, shape: tuple[int, ...]) -> Annotation:
    """What ``mark_sharding`` leaves on a tensor of ``shape``, with a mesh that lies as the sharding does.

    Raises ValueError for a sharding of another rank, or over other devices than the job's.
    """
    count = len(runtime.client().devices())
    if not sharding.tiles:
        return Annotation(
            sharding,
            canonical(sharding.text),
            Mesh(np.arange(count), (count,)),
            (None,) * len(shape),
        )
    if len(sharding.per_dimension) != len(shape):
        parts = len(sharding.per_dimension)
        raise ValueError(MSG_RANK.format(text=sharding.text, parts=parts, shape=shape))
    if sorted(sharding.devices) != list(range(count)):
        size = math.prod(sharding.tiles)
        raise ValueError(MSG_DEVICES.format(text=sharding.text, size=size, count=count))
    mesh = Mesh(np.array(sharding.devices), sharding.tiles)
    spec = tuple(i if parts > 1 else None for i, parts in enumerate(sharding.per_dimension))
    laid = REPLICATED if 0 in shape else sharding  # XLA lays a value without elements out whole
    return Annotation(laid, canonical(laid.text), mesh, spec)
