"""Conversions between torch's ``DeviceMesh`` and placements and torch_xla's ``Mesh`` and partition specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from xla_core.support import caches
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec, axes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement, Shard

MSG_DEVICE_TYPE: Final = (
    "the device mesh is for {kind!r} devices; tensors are split over "
    "DeviceMesh('xla', list(range(xr.global_runtime_device_count())))"
)
MSG_COUNT: Final = (
    "`placements` must have the same length as `device_mesh.ndim`! Got {count} placements for a device "
    "mesh of {rank} dimensions: give one for each, Replicate() for a dimension whose devices hold copies"
)
MSG_PLACEMENT: Final = (
    "unsupported placement {placement!r} on device mesh dimension {axis}: a placement is "
    "Shard(dimension) or Replicate()"
)
MSG_PARTIAL: Final = (
    "a tensor cannot have the placement {placement} on device mesh dimension {axis}. Partial sums "
    "exist only inside a program, where XLA creates them and adds them up; give Replicate() or "
    "Shard(dimension), and the complete value"
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
    """A placement that is neither ``Shard`` nor ``Replicate``; torch raises a RuntimeError for it."""


class PartialPlacementError(NotImplementedError, PlacementError):
    """The placement ``Partial``, which a tensor outside a program cannot have."""


class PlacementDimensionError(IndexError, ValueError):
    """A ``Shard`` of a dimension that the tensor does not have; torch raises an IndexError for it."""


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """The ``Mesh`` with the devices, shape and axis names of ``dt_mesh``.

    Raises ValueError if its device type is not ``xla``.
    """
    if dt_mesh.device_type != "xla":
        raise ValueError(MSG_DEVICE_TYPE.format(kind=dt_mesh.device_type))
    grid = dt_mesh.mesh.numpy()
    return Mesh(grid.flatten(), grid.shape, dt_mesh.mesh_dim_names)


@caches.memoized("device meshes of meshes", 256)
def device_mesh_of(mesh: Mesh) -> DeviceMesh:
    """The ``DeviceMesh`` with the devices, shape and axis names of ``mesh``."""
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.tensor(mesh.listed_ids).reshape(mesh.mesh_shape)
    return DeviceMesh("xla", grid, mesh_dim_names=mesh.axis_names)


def placements_of(spec: Spec, mesh: Mesh) -> tuple[Placement, ...]:
    """For each mesh axis, ``Shard(dimension)`` if ``spec`` splits a dimension over it, else ``Replicate()``."""
    from torch.distributed.tensor import Replicate, Shard

    count = len(mesh.mesh_shape)
    groups = axes_of(spec, mesh.axis_names, count)
    dimension = {axis: i for i, group in enumerate(groups) for axis in group}
    return tuple(Shard(dimension[i]) if i in dimension else Replicate() for i in range(count))


def checked_partition_spec(
    shape: tuple[int, ...], placements: Sequence[Placement], rank: int
) -> tuple[int | tuple[int, ...] | None, ...]:
    """The partition spec, in numbers of mesh axes, of a tensor of ``shape`` on a mesh of ``rank`` dimensions.

    Raises ValueError unless there are ``rank`` placements, PlacementError for one that is neither ``Shard`` nor
    ``Replicate``, and PlacementDimensionError for a ``Shard`` of a dimension that the tensor does not have.
    """
    placements = tuple(placements)
    if len(placements) != rank:
        raise ValueError(MSG_COUNT.format(count=len(placements), rank=rank))
    return _partition_spec(shape, placements)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Placement]
) -> tuple[object, ...]:
    """The partition spec, in numbers of mesh axes, that splits ``tensor`` as ``placements`` say.

    ``placements`` has one entry per mesh dimension. Raises PlacementError (a RuntimeError and a ValueError) for
    one that is neither ``Shard`` nor ``Replicate``, and PlacementDimensionError (an IndexError and a ValueError)
    for a ``Shard`` of a dimension that the tensor does not have.
    """
    return _partition_spec(tuple(tensor.shape), tuple(placements))


def _partition_spec(
    shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[int | tuple[int, ...] | None, ...]:
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


def _check_dimension(placement: Shard, shape: tuple[int, ...]) -> None:
    rank, dim = len(shape), placement.dim
    if rank == 0:
        raise PlacementDimensionError(MSG_NO_DIMENSION.format(dim=dim, placement=placement))
    if not -rank <= dim < rank:
        text = MSG_DIMENSION.format(
            first=-rank, last=rank - 1, dim=dim, placement=placement, shape=shape, rank=rank
        )
        raise PlacementDimensionError(text)
