"""``shard_as``: two tensors that are split in the same way, which the compiler chooses."""

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
    """Both tensors, split in the same way; so are their gradients."""

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
    """``a`` and ``b``, trees of tensors of one structure, each pair of tensors split in the same way.

    The compiler decides how, from what it knows of either. Use the results from then on. The gradients of a
    pair are split in the same way, too. Raises ValueError for trees of different structures or tensors of
    different shapes, and what ``mark_sharding`` raises for a tensor that cannot be split.
    """
    leaves, structure = pytree.tree_flatten(a)
    others, other = pytree.tree_flatten(b)
    if structure != other:
        raise ValueError(MSG_STRUCTURE.format(a=structure, b=other))
    pairs = [_pair(x, y) for x, y in zip(leaves, others, strict=True)]
    firsts, seconds = ([pair[i] for pair in pairs] for i in (0, 1))
    return pytree.tree_unflatten(firsts, structure), pytree.tree_unflatten(seconds, structure)


def _pair(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    if a is None and b is None:
        return None, None
    if a is None or b is None:
        raise ValueError(MSG_NONE)
    if a.shape != b.shape:
        raise ValueError(MSG_SHAPES.format(a=tuple(a.shape), b=tuple(b.shape)))
    first, second = _ShardAs.apply(unwrap_sharded_tensor(a), unwrap_sharded_tensor(b))
    return first, second
