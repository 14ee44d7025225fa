"""New tensors with a tensor's value and another sharding; gradients are moved back to the old sharding."""

from __future__ import annotations

import dataclasses

import torch
from torch.autograd.function import FunctionCtx

from xla_core.extension_api.operators import Gradients, Operand, handler_of
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_spmd.lowering.annotation_ops import ANNOTATE
from xla_spmd.sharding.annotation import Annotation


@dataclasses.dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes in which a value is moved forward, and its gradient backward; None means the value's dtype."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None


class _Reshard(torch.autograd.Function):
    """``apply(tensor, target, source, dtypes)``: see ``resharded``. It has derivatives of any order."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        tensor: torch.Tensor,
        target: Annotation,
        source: Annotation,
        dtypes: Dtypes,
    ) -> torch.Tensor:
        ctx.target, ctx.source, ctx.dtypes, ctx.dtype = target, source, dtypes, tensor.dtype
        cast = tensor if dtypes.forward is None else tensor.to(dtypes.forward)
        result: XLATensor = handler_of(ANNOTATE)((cast, target.sharding.text), None)
        # as after mark_sharding, values that are written to the tensor later are split likewise
        storage_of(result).annotate(target)
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        moved = gradients[0].to(ctx.dtypes.backward or ctx.dtype)
        back = _Reshard.apply(moved, ctx.source, ctx.target, Dtypes())
        return back.to(ctx.dtype), None, None, None


def resharded(
    tensor: torch.Tensor, target: Annotation, source: Annotation, dtypes: Dtypes
) -> Operand:
    """The value of ``tensor``, split as ``target`` says; its gradient will be split as ``source`` says."""
    return _Reshard.apply(tensor, target, source, dtypes)
