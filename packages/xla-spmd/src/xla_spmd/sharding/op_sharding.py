"""``OpSharding``, which makes a sharding of torch_xla's lists of devices, and annotations made of shardings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

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
    "OpSharding: replication_groups {groups} must have one list for each number in group_assignment "
    "{assignment}, all of the same length"
)
MSG_TYPE: Final = (
    "OpSharding: a sharding of type {type} cannot be made of lists of devices; use TILED, PARTIAL, REPLICATED, "
    "MAXIMAL or MANUAL"
)
MSG_RANK: Final = "a sharding {text} of {parts} dimensions does not fit a tensor of shape {shape}"
MSG_DEVICES: Final = (
    "the sharding {text} is over {size} devices, this job has {count}: name each device of the "
    "job once"
)


class _FromLists(type):
    """Makes ``OpSharding(...)`` return a ``Sharding``, and each ``Sharding`` an instance of ``OpSharding``."""

    def __call__(
        cls,
        tile_assignment: Sequence[object],
        group_assignment: Sequence[object],
        replication_groups: Sequence[Sequence[int]],
        sharding_type: int,
    ) -> Sharding:
        return from_lists(tile_assignment, group_assignment, replication_groups, sharding_type)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Sharding)


class OpSharding(metaclass=_FromLists):
    """The sharding of one value: ``OpSharding(tile_assignment, group_assignment, replication_groups, type)``.

    ``tile_assignment`` is a nested list of device numbers, with one dimension per dimension of the value. A
    sharding of type PARTIAL, in which several devices hold the same part, is described in one of two ways.
    Either ``tile_assignment`` has one more dimension, whose devices hold the same part. Or
    ``replication_groups`` has a list of devices for each part, and ``group_assignment`` is a nested list of the
    numbers of these groups, with one dimension per dimension of the value. ``type`` is the number of a
    ``ShardingType``. Raises what ``from_lists`` raises.
    """


def from_lists(
    tile_assignment: Sequence[object],
    group_assignment: Sequence[object],
    replication_groups: Sequence[Sequence[int]],
    sharding_type: int,
) -> Sharding:
    """The sharding that the arguments describe; see ``OpSharding``.

    Raises ValueError for the types TUPLE and UNKNOWN, and for groups that do not fit ``group_assignment``.
    """
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
    """The annotation of a tensor of ``shape`` that is split as ``sharding`` says, with a mesh made to fit.

    Raises ValueError if the sharding has another number of dimensions, or does not name each device of the job
    once.
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
    actual = REPLICATED if 0 in shape else sharding  # XLA replicates a value without elements
    return Annotation(actual, canonical(actual.text), mesh, spec)
