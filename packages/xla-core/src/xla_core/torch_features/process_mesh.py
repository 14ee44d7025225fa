"""DTensors over a ``DeviceMesh("xla", ...)`` whose members are processes, each with its own part.

torch hands ``distribute_tensor`` and ``distribute_module`` of every ``xla`` mesh to PyTorch/XLA. Over the devices
of one program they split tensors (the package xla-spmd); here they make DTensors, as torch does for other
devices. All else about DTensors is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from xla_core.torch_bridge import torch_distributed_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

MSG_PLACEMENT: Final = (
    "a tensor is distributed over processes by Shard(dimension) and Replicate(), got {placement!r} for mesh "
    "dimension {dim}; DTensor.from_local takes what each process has, with any placements"
)
MSG_COUNT: Final = (
    "got {count} placements for a device mesh of {rank} dimensions; give one for each"
)
MSG_NOT_A_LEAF: Final = (
    "distribute_tensor distributes leaf tensors, and this one was computed ({function}); distribute what it "
    "was computed from, or call .detach() first"
)


def is_over_processes(mesh: object) -> bool:
    """Whether the mesh has process groups; a mesh of devices of one program has none."""
    return bool(torch_distributed_private.group_names(mesh))


def distribute_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None
) -> DTensor:
    """The values that the mesh's first process has, as a DTensor; ``Replicate()`` where nothing is said.

    Raises ValueError for placements that do not fit the mesh, RuntimeError for other kinds than ``Shard``
    and ``Replicate`` and for a tensor that is no leaf.
    """
    from torch.distributed.tensor import DTensor, Replicate

    wanted = list(placements) if placements is not None else [Replicate()] * mesh.ndim
    if len(wanted) != mesh.ndim:
        raise ValueError(MSG_COUNT.format(count=len(wanted), rank=mesh.ndim))
    if not tensor.is_leaf:
        raise RuntimeError(MSG_NOT_A_LEAF.format(function=tensor.grad_fn))
    local = tensor.detach().to("xla", copy=True)
    for dim, placement in enumerate(wanted):
        local = _part(local, mesh, dim, placement)
    distributed = DTensor.from_local(
        local, mesh, wanted, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return distributed.requires_grad_(tensor.requires_grad)


def _part(whole: torch.Tensor, mesh: DeviceMesh, dim: int, placement: Placement) -> torch.Tensor:
    """What this process has of ``whole`` along one dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    # another kind of shard is a subclass in some versions of torch
    if type(placement) is not Shard and not isinstance(placement, Replicate):
        raise RuntimeError(MSG_PLACEMENT.format(placement=placement, dim=dim))
    group = mesh.get_group(dim)
    torch.distributed.broadcast(whole, torch.distributed.get_global_rank(group, 0), group)
    if type(placement) is not Shard:
        return whole
    # chunks of equal size, of which the last ones may be smaller, or have nothing
    axis, place = placement.dim % max(whole.dim(), 1), mesh.get_local_rank(dim)
    step = -(-whole.size(axis) // mesh.size(dim))
    start = min(step * place, whole.size(axis))
    return whole.narrow(axis, start, min(step, whole.size(axis) - start)).clone()


def distribute_module(
    module: nn.Module,
    mesh: DeviceMesh,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
) -> None:
    """Make DTensors over ``mesh`` of the parameters and buffers of ``module``, in place.

    ``partition_fn(name, submodule, mesh)`` is called for each submodule first, and may make some of them itself;
    what it leaves is replicated.
    """
    from torch.distributed.tensor import DTensor

    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        for key, parameter in submodule.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                replaced = nn.Parameter(
                    distribute_tensor(parameter.data, mesh), requires_grad=parameter.requires_grad
                )
                submodule.register_parameter(key, replaced)
        for key, buffer in submodule.named_buffers(recurse=False):
            if not isinstance(buffer, DTensor):
                setattr(submodule, key, distribute_tensor(buffer, mesh))
