"""DTensors over a ``DeviceMesh("xla", ...)`` of processes, each of which has a shard.

PyTorch leaves ``distribute_tensor`` and ``distribute_module`` on an ``xla`` mesh to PyTorch/XLA. For a mesh over
the devices of one program they shard tensors (package xla-spmd). For a mesh of processes they make DTensors, as
PyTorch does for other devices. Everything else about DTensors is PyTorch's own.
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
    "dimension {dim}; DTensor.from_local takes the local tensors of all processes, with any placements"
)
MSG_COUNT: Final = (
    "got {count} placements for a device mesh of {rank} dimensions; give one for each"
)
MSG_NOT_A_LEAF: Final = (
    "distribute_tensor distributes leaf tensors, and this one was computed ({function}); distribute the tensors "
    "that it was computed from, or call .detach() first"
)


def is_over_processes(mesh: object) -> bool:
    """Whether the mesh is one of processes, which has process groups; a mesh of devices has none."""
    return bool(torch_distributed_private.group_names(mesh))


def distribute_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None
) -> DTensor:
    """A DTensor with the values that ``tensor`` has in the mesh's first process.

    ``placements`` has one item per mesh dimension (default: ``Replicate()`` for each). Raises ValueError for
    another number of placements, RuntimeError for placements other than ``Shard`` and ``Replicate``, and for a
    tensor that is not a leaf.
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
    """This process's part of ``whole`` along dimension ``dim`` of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    # other kinds of shards are subclasses of Shard in some versions of torch
    if type(placement) is not Shard and not isinstance(placement, Replicate):
        raise RuntimeError(MSG_PLACEMENT.format(placement=placement, dim=dim))
    group = mesh.get_group(dim)
    torch.distributed.broadcast(whole, torch.distributed.get_global_rank(group, 0), group)
    if type(placement) is not Shard:
        return whole
    # chunks of equal size; the last ones may be smaller, or empty
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

    ``partition_fn(name, submodule, mesh)`` is called first for each submodule, and may make some of the DTensors;
    the other parameters and buffers are replicated. Tied parameters and buffers stay tied.
    """
    from torch.distributed.tensor import DTensor

    # by id, together with the original, which keeps its id from being used again
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        for key, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                continue
            if id(parameter) not in replaced:
                whole = distribute_tensor(parameter.data, mesh)
                distributed = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                replaced[id(parameter)] = parameter, distributed
            submodule.register_parameter(key, replaced[id(parameter)][1])
        for key, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
            if isinstance(buffer, DTensor):
                continue
            if id(buffer) not in replaced:
                replaced[id(buffer)] = buffer, distribute_tensor(buffer, mesh)
            setattr(submodule, key, replaced[id(buffer)][1])
