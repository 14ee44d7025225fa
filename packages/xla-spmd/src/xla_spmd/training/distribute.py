"""``torch.distributed.tensor`` on ``DeviceMesh("xla", ...)``: its two functions call those here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from xla_core.extension_api import meshes
from xla_core.extension_api.operators import Tree
from xla_spmd.sharding.dtensor_placements import checked_partition_spec, convert_to_xla_mesh
from xla_spmd.sharding.mode import use_spmd
from xla_spmd.tensors.marking import mark_sharding

MSG_NO_MESH: Final = "xla_distribute_module got no device mesh; pass DeviceMesh('xla', ...)"


def with_xla(func: Callable[..., object]) -> Callable[..., Any]:
    """A decorator: SPMD mode is on when ``func`` runs."""

    @functools.wraps(func)
    def run(*args: Tree, **kwargs: Tree) -> Tree:
        use_spmd()
        return func(*args, **kwargs)

    return run


def xla_distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> torch.Tensor:
    """``tensor``, moved to the device if it is elsewhere, split as ``placements`` say: XLAShardedTensor.

    ``placements`` are one per dimension of ``device_mesh``; without any, every device holds the whole value. A
    leaf that needs a gradient comes as a leaf, which gets the gradient. Raises what
    ``XLAShardedTensor.redistribute`` raises for placements and meshes, and what ``mark_sharding`` raises. Over
    a mesh of processes, each with a part of its own, it is a DTensor.
    """
    if meshes.is_over_processes(device_mesh):
        return meshes.distribute_tensor(tensor, device_mesh, placements)
    mesh = convert_to_xla_mesh(device_mesh)
    wanted = list(placements) if placements else [Replicate()] * device_mesh.ndim
    spec = checked_partition_spec(tuple(tensor.shape), wanted, device_mesh.ndim)
    sharded = mark_sharding(_on_device(tensor), mesh, spec)
    if tensor.is_leaf and tensor.requires_grad:
        return sharded.detach().requires_grad_()
    return sharded


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "xla":
        return tensor
    if tensor.is_leaf:
        return tensor.detach().to("xla")
    return tensor.to("xla")


def xla_distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., object] | None = None,
    output_fn: Callable[..., object] | None = None,
) -> nn.Module:
    """``module`` on the device, with parameters split by ``partition_fn(name, submodule, device_mesh)``.

    ``input_fn(module, inputs, device_mesh)`` runs before every forward, ``output_fn(module, outputs,
    device_mesh)`` after it. Parameters that ``partition_fn`` leaves alone are whole on every device.
    With ``auto_policy`` they are split as the first training step finds best, over a mesh of its own.
    Raises ValueError without a mesh for ``xla`` devices.
    """
    if device_mesh is None:
        raise ValueError(MSG_NO_MESH)
    convert_to_xla_mesh(device_mesh)
    module.to("xla")
    if meshes.is_over_processes(device_mesh):
        meshes.distribute_module(module, device_mesh, partition_fn)
    elif partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, device_mesh)
    if input_fn is not None:
        before: Callable[..., Any] = functools.partial(_before, input_fn, device_mesh)
        module.register_forward_pre_hook(before)
    if output_fn is not None:
        after: Callable[..., object] = functools.partial(_after, output_fn, device_mesh)
        module.register_forward_hook(after)
    return module


def _before(
    function: Callable[..., object], mesh: DeviceMesh, module: nn.Module, inputs: Tree
) -> Tree:
    return function(module, inputs, mesh)


def _after(
    function: Callable[..., object],
    mesh: DeviceMesh,
    module: nn.Module,
    _inputs: Tree,
    outputs: Tree,
) -> Tree:
    return function(module, outputs, mesh)


def auto_policy(mod_name: str, mod: nn.Module, mesh: DeviceMesh) -> None:
    """The ``partition_fn`` that leaves the choice to the first training step: ``xr.use_spmd(auto=True)``.

    ``torch.distributed.tensor.distribute_module`` calls it for each module ``mod`` of the model, with its name
    ``mod_name`` and the ``mesh``; none of the three is looked at.
    """
    del mod_name, mod, mesh
    use_spmd(auto=True)
