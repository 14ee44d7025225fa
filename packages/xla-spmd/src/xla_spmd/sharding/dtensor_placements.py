"""torch's ``DeviceMesh`` and placements, and torch_xla's ``Mesh`` and partition specs: each as the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from xla_core.support import caches
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec, axes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

MSG_DEVICE_TYPE: Final = (
    "the device mesh is for {kind!r} devices; tensors are split over "
    "DeviceMesh('xla', list(range(xr.global_runtime_device_count())))"
)
MSG_COUNT: Final = (
    "`placements` must have the same length as `device_mesh.ndim`! Got {count} placements for a device "
    "mesh of {rank} dimensions: write one for each, Replicate() where devices hold copies"
)
MSG_PLACEMENT: Final = (
    "unsupported placement {placement!r} on device mesh dimension {axis}: a placement is "
    "Shard(dimension) or Replicate()"
)
MSG_PARTIAL: Final = (
    "the placement {placement} on device mesh dimension {axis} cannot be given to a tensor. Partial sums "
    "exist inside a program only, where XLA chooses them and adds them up; give Replicate() or "
    "Shard(dimension) and the whole value"
)
MSG_DIMENSION: Final = (
    "Dimension out of range (expected to be in range of [{first}, {last}], but got {dim}): {placement} "
    "of a tensor of shape {shape}, which has {rank} dimensions"
)

MSG_NO_DIMENSION: Final = (
    "Dimension specified as {dim} but tensor has no dimensions: {placement} of a tensor of one element. "
    "Give Replicate()"
)


class PlacementError(RuntimeError, ValueError):
    """A placement of a kind that tensors cannot have; torch raises a RuntimeError."""


class PartialPlacementError(NotImplementedError, PlacementError):
    """Partial sums, asked for as the placement of a tensor."""


class PlacementDimensionError(IndexError, ValueError):
    """A placement on a dimension that the tensor lacks; torch raises an IndexError."""


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """The ``Mesh`` of the same devices. Raises ValueError for a mesh of another kind of device."""
    if dt_mesh.device_type != "xla":
        raise ValueError(MSG_DEVICE_TYPE.format(kind=dt_mesh.device_type))
    grid = dt_mesh.mesh.numpy()
    return Mesh(grid.flatten(), grid.shape, dt_mesh.mesh_dim_names)


@caches.memoized("device meshes of meshes", 256)
def device_mesh_of(mesh: Mesh) -> DeviceMesh:
    """The ``DeviceMesh`` of the same devices; ``convert_to_xla_mesh`` the other way round."""
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.tensor(mesh.listed_ids).reshape(mesh.mesh_shape)
    return DeviceMesh("xla", grid, mesh_dim_names=mesh.axis_names)


def placements_of(spec: Spec, mesh: Mesh) -> tuple[Placement, ...]:
    """Per mesh axis, ``Shard(dimension)`` of the dimension that ``spec`` lays on it, or ``Replicate()``."""
    from torch.distributed.tensor import Replicate, Shard

    count = len(mesh.mesh_shape)
    groups = axes_of(spec, mesh.axis_names, count)
    dimension = {axis: i for i, group in enumerate(groups) for axis in group}
    return tuple(Shard(dimension[i]) if i in dimension else Replicate() for i in range(count))


def checked_partition_spec(
    shape: tuple[int, ...], placements: Sequence[Placement], rank: int
) -> tuple[Any, ...]:
    """The partition spec of a tensor of ``shape`` on a mesh of ``rank`` dimensions, as numbers of axes.

    Raises ValueError for another number of placements, PlacementError for another kind than ``Shard``
    and ``Replicate``, and PlacementDimensionError for a dimension that the tensor lacks.
    """
    placements = tuple(placements)
    if len(placements) != rank:
        raise ValueError(MSG_COUNT.format(count=len(placements), rank=rank))
    return _partition_spec(shape, placements)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Placement]
) -> tuple[object, ...]:
    """The partition spec of ``tensor`` for a placement per mesh dimension, as numbers of mesh axes.

    Raises PlacementError (a RuntimeError and a ValueError) for placements other than ``Shard`` and
    ``Replicate``, and PlacementDimensionError (an IndexError and a ValueError) for a dimension that the
    tensor lacks.
    """
    return _partition_spec(tuple(tensor.shape), tuple(placements))


def _partition_spec(
    shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[object, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    axes: list[list[int]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            _check_dimension(placement, shape)
            axes[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            raise PartialPlacementError(MSG_PARTIAL.format(placement=placement, axis=axis))
        elif not isinstance(placement, Replicate):
            raise PlacementError(MSG_PLACEMENT.format(placement=placement, axis=axis))
    return tuple(tuple(a) if len(a) > 1 else a[0] if a else None for a in axes)


def _check_dimension(placement: Any, shape: tuple[int, ...]) -> None:
    rank, dim = len(shape), placement.dim
    if rank == 0:
        raise PlacementDimensionError(MSG_NO_DIMENSION.format(dim=dim, placement=placement))
    if not -rank <= dim < rank:
        text = MSG_DIMENSION.format(
            first=-rank, last=rank - 1, dim=dim, placement=placement, shape=shape, rank=rank
        )
        raise PlacementDimensionError(text)
