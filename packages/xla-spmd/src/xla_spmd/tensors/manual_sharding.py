"""Manual sharding: a tensor stands for each device's own part, and XLA splits nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.autograd.function import FunctionCtx

from xla_core.extension_api.operators import Gradients, handler_of
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_spmd.lowering.annotation_ops import TO_SHARD, TO_WHOLE
from xla_spmd.sharding.annotation import Annotation, checked_sharding
from xla_spmd.sharding.hlo_sharding import MANUAL, REPLICATED
from xla_spmd.sharding.mesh import Mesh, get_global_mesh
from xla_spmd.sharding.partition_spec import Spec
from xla_spmd.tensors.marking import checked
from xla_spmd.tensors.sharded_tensor import (
    XLAShardedTensor,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
)

MSG_NO_MESH: Final = (
    "{function} got no mesh, and there is no global one; "
    "pass mesh=, or call xs.set_global_mesh(mesh)"
)
MSG_SHAPE: Final = (
    "disable_manual_sharding: parts of shape {part} do not make up a tensor of shape {full} split as "
    "{spec}, whose parts have shape {wanted}"
)


def _mesh(mesh: Mesh | None, function: str) -> Mesh:
    chosen = mesh or get_global_mesh()
    if chosen is None:
        raise ValueError(MSG_NO_MESH.format(function=function))
    return chosen


class _ToShard(torch.autograd.Function):
    """The part of a tensor that each device holds; the gradient is put together to a whole one."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, text: str) -> torch.Tensor:
        ctx.text, ctx.shape = text, tuple(tensor.shape)
        return handler_of(TO_SHARD)((tensor, text), None)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        return handler_of(TO_WHOLE)((gradients[0], ctx.text, ctx.shape), None), None


class _ToWhole(torch.autograd.Function):
    """The tensor that the devices' parts make up; each device gets its part of the gradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: torch.Tensor, text: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.text = text
        return handler_of(TO_WHOLE)((tensor, text, shape), None)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        return handler_of(TO_SHARD)((gradients[0], ctx.text), None), None, None


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: Spec, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The part of ``t`` that each device holds if ``t`` is split by ``partition_spec`` over ``mesh``.

    Each device computes operators on its own part, until ``disable_manual_sharding`` combines the parts to a whole
    tensor. ``mesh`` defaults to the global one. Raises ValueError if there is no mesh, and what ``mark_sharding``
    raises.
    """
    chosen = _mesh(mesh, "enable_manual_sharding")
    tensor = checked(unwrap_sharded_tensor(t))
    sharding = checked_sharding(chosen, partition_spec, tuple(tensor.shape))
    part = _ToShard.apply(tensor, sharding.text)
    return _manual(part, chosen)


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: Spec,
    full_shape: Sequence[int],
    *,
    mesh: Mesh | None = None,
) -> XLAShardedTensor:
    """The whole tensor of shape ``full_shape``, split by ``partition_spec``, of which ``t`` is each device's part.

    ``mesh`` defaults to the global one. Raises ValueError if there is no mesh or the parts have another shape than
    follows from ``full_shape``, and what ``mark_sharding`` raises.
    """
    chosen = _mesh(mesh, "disable_manual_sharding")
    tensor = checked(unwrap_sharded_tensor(t))
    shape = tuple(full_shape)
    sharding = checked_sharding(chosen, partition_spec, shape)
    part_shape = sharding.shard_shape(shape)
    if tuple(tensor.shape) != part_shape:
        text = MSG_SHAPE.format(
            part=tuple(tensor.shape), full=shape, spec=tuple(partition_spec), wanted=part_shape
        )
        raise ValueError(text)
    whole = _ToWhole.apply(tensor, sharding.text, shape)
    return wrap_as_sharded_tensor(whole, chosen, partition_spec)


def to_part(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """The part of ``tensor`` that each device holds if it is split as the HLO sharding ``text`` says."""
    part: torch.Tensor = _ToShard.apply(checked(tensor), text)
    return part


def to_whole(tensor: torch.Tensor, text: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of ``shape`` of which ``tensor`` is each device's part if split as HLO's ``text`` says."""
    whole: torch.Tensor = _ToWhole.apply(checked(tensor), text, tuple(shape))
    return whole


def _mark_manual_sharding(t: torch.Tensor) -> XLAShardedTensor:
    """``t`` as each device's own part: each device computes with the whole value of ``t``, and XLA splits nothing.

    ``enable_manual_sharding`` instead cuts a tensor into parts. Raises ValueError if there is no global mesh.
    """
    chosen = _mesh(None, "_mark_manual_sharding")
    tensor = checked(unwrap_sharded_tensor(t))
    return _manual(_ToShard.apply(tensor, REPLICATED.text), chosen)


def over_parts(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    specs: Sequence[Spec],
    results: Sequence[tuple[Spec, tuple[int, ...]]],
    mesh: Mesh | None,
) -> tuple[torch.Tensor, ...]:
    """Call ``function`` with each device's parts of ``tensors``, and return its results as whole tensors.

    ``specs`` are the partition specs of ``tensors`` (None among ``tensors`` is passed on), ``results`` the
    partition specs and whole shapes of the results. ``mesh`` None means the global one. Autograd does not record
    the call. Raises what ``enable_manual_sharding`` raises.
    """
    chosen = _mesh(mesh, "a partition_spec")
    parts = [
        None if t is None else TO_SHARD(t, checked_sharding(chosen, spec, tuple(t.shape)).text)
        for t, spec in zip(tensors, specs, strict=True)
    ]
    return tuple(
        TO_WHOLE(part, checked_sharding(chosen, spec, shape).text, shape)
        for part, (spec, shape) in zip(function(*parts), results, strict=True)
    )


def _manual(part: XLATensor, mesh: Mesh) -> XLAShardedTensor:
    storage_of(part).annotate(Annotation(MANUAL, MANUAL.text, mesh, (None,) * part.dim()))
    return wrap_as_sharded_tensor(part, mesh, (None,) * part.dim())
