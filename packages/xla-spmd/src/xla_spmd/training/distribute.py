"""``torch.distributed.tensor``'s ``distribute_tensor`` and ``distribute_module`` for ``DeviceMesh("xla", ...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from xla_core.extension_api import meshes
from xla_core.extension_api.operators import Tree
from xla_spmd.sharding.dtensor_placements import checked_partition_spec, convert_to_xla_mesh
from xla_spmd.sharding.mode import use_spmd
from xla_spmd.tensors.marking import mark_sharding

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MSG_NO_MESH: Final = "xla_distribute_module got no device mesh; pass DeviceMesh('xla', ...)"


def with_xla(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A decorator that turns SPMD mode on before ``func`` runs."""

    @functools.wraps(func)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        use_spmd()
        return func(*args, **kwargs)

    return run


def xla_distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> torch.Tensor:
    """An ``XLAShardedTensor`` with the value of ``tensor``, split over ``device_mesh`` as ``placements`` say.

    ``tensor`` is moved to the device if necessary. ``placements`` has one entry per dimension of ``device_mesh``;
    by default every device holds the whole value. If ``tensor`` is a leaf that needs a gradient, so is the result,
    which then gets the gradient. If ``device_mesh`` consists of processes that each hold a part, the result is a
    DTensor.

    Raises what ``XLAShardedTensor.redistribute`` raises for placements and meshes, and what ``mark_sharding``
    raises.
    """
    if meshes.is_over_processes(device_mesh):
        return meshes.distribute_tensor(tensor, device_mesh, placements)
    mesh = convert_to_xla_mesh(device_mesh)
    per_dimension = list(placements) if placements else [Replicate()] * device_mesh.ndim
    spec = checked_partition_spec(tuple(tensor.shape), per_dimension, device_mesh.ndim)
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
    """Move ``module`` to the device, let ``partition_fn`` split its parameters, and return it.

    ``partition_fn(name, submodule, device_mesh)`` is called for each submodule, the module itself included.
    Parameters that it does not split are whole on every device; without it (default: None) all are. With
    ``auto_policy``, the first training step chooses the mesh and the shardings. ``input_fn(module, inputs,
    device_mesh)`` runs before each forward call, and ``output_fn(module, outputs, device_mesh)`` after it.
    Raises ValueError if ``device_mesh`` is None or its device type is not ``xla``.
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
        before: Callable[..., object] = functools.partial(_before, input_fn, device_mesh)
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
    """A ``partition_fn`` with which the first training step chooses the shardings: ``xr.use_spmd(auto=True)``.

    ``torch.distributed.tensor.distribute_module`` calls it for each module ``mod`` of the model, with its name
    ``mod_name`` and the ``mesh``. It ignores all three.
    """
    del mod_name, mod, mesh
    use_spmd(auto=True)
