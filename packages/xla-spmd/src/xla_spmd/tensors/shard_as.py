"""``shard_as``: the compiler splits two tensors in the same way."""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from xla_core.extension_api.operators import Gradients, Operand, handler_of
from xla_spmd.lowering.annotation_ops import SHARD_AS
from xla_spmd.tensors.marking import checked
from xla_spmd.tensors.sharded_tensor import unwrap_sharded_tensor

MSG_STRUCTURE: Final = "shard_as needs two trees of the same structure, got {a} and {b}"
MSG_SHAPES: Final = "shard_as needs tensors of the same shape, got {a} and {b}"
MSG_NONE: Final = "shard_as: one of the two trees has None where the other has a tensor"


class _ShardAs(torch.autograd.Function):
    """Two tensors, split in the same way, and so are their two gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = handler_of(SHARD_AS)((checked(a), checked(b)), None)
        return first, second

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        return tuple(handler_of(SHARD_AS)(gradients, None))


def shard_as(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Trees of tensors like ``a`` and ``b``, in which each tensor is split like its counterpart in the other tree.

    ``a`` and ``b`` must have the same structure, and their tensors the same shapes. The compiler chooses the
    sharding of each pair from what it knows about either tensor, and splits the two gradients of the pair in the
    same way, too. Only the returned tensors are affected. Raises ValueError if structures or shapes differ, and
    what ``mark_sharding`` raises for a tensor that cannot be split.
    """
    leaves_a, structure_a = pytree.tree_flatten(a)
    leaves_b, structure_b = pytree.tree_flatten(b)
    if structure_a != structure_b:
        raise ValueError(MSG_STRUCTURE.format(a=structure_a, b=structure_b))
    pairs = [_pair(x, y) for x, y in zip(leaves_a, leaves_b, strict=True)]
    firsts, seconds = ([pair[i] for pair in pairs] for i in (0, 1))
    return pytree.tree_unflatten(firsts, structure_a), pytree.tree_unflatten(seconds, structure_a)


def _pair(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    if a is None and b is None:
        return None, None
    if a is None or b is None:
        raise ValueError(MSG_NONE)
    if a.shape != b.shape:
        raise ValueError(MSG_SHAPES.format(a=tuple(a.shape), b=tuple(b.shape)))
    first, second = _ShardAs.apply(unwrap_sharded_tensor(a), unwrap_sharded_tensor(b))
    return first, second
