"""A tensor's value laid out in another way, as a tensor of its own; gradients come back the way it went."""

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
    """In which dtype a value is moved, and in which its gradient; None: that of the value."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None


class _Relaid(torch.autograd.Function):
    """``apply(tensor, target, source, dtypes)``, which can be derived any number of times."""

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
        relaid_tensor: XLATensor = handler_of(ANNOTATE)((cast, target.sharding.text), None)
        # as after mark_sharding: what is written to it later lies so, too
        storage_of(relaid_tensor).annotate(target)
        return relaid_tensor

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        moved = gradients[0].to(ctx.dtypes.backward or ctx.dtype)
        back = _Relaid.apply(moved, ctx.source, ctx.target, Dtypes())
        return back.to(ctx.dtype), None, None, None


def relaid(tensor: torch.Tensor, target: Annotation, source: Annotation, dtypes: Dtypes) -> Operand:
    """The value of ``tensor`` split as ``target`` says; its gradient is split as ``source`` says."""
    return _Relaid.apply(tensor, target, source, dtypes)
