"""Collectives that autograd goes through (``torch_xla.core.functions``).

The program is the same on every replica, so each gradient is that of the sum of all replicas' losses.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Gradients, Operand
from xla_core.extension_api.tensors import storage_of
from xla_dist.collectives import model_collectives
from xla_dist.collectives.model_collectives import Groups, flat_groups, reduced, world_of


def _group_size(tensor: Operand, groups: Groups) -> int:
    return flat_groups(groups, world_of(storage_of(tensor).trace))[1]


class AllReduce(Function):
    """``all_reduce`` of one tensor: ``sum``, ``min``, ``max`` and ``mul`` have gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, reduce_type: str, value: torch.Tensor, scale: float, groups: Groups
    ) -> torch.Tensor:
        """The reduction, times ``scale``."""
        (result,) = reduced(reduce_type, [value], groups)
        ctx.details = (reduce_type, scale, groups)
        if reduce_type != "sum":
            ctx.save_for_backward(value, result)
        return result if scale == 1.0 else result * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """Sums every replica's gradient; of a minimum, shared by those that attain it."""
        kind, scale, groups = ctx.details
        gradient = gradient * scale
        if kind == "mul":
            value, _ = ctx.saved_tensors
            return None, _product_gradient(gradient, value, groups), None, None
        (total,) = reduced("sum", [gradient], groups)
        if kind in ("min", "max"):
            value, result = ctx.saved_tensors
            attains = (value == result).to(total.dtype)
            total = total * attains / reduced("sum", [attains], groups)[0]
        elif kind != "sum":
            raise RuntimeError(f"all_reduce({kind!r}) has no gradient")
        return None, total, None, None


def _product_gradient(gradient: torch.Tensor, value: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Each replica's factor gets the products of the others', which zeros do not disturb."""
    count = _group_size(value, groups)
    factors = model_collectives.all_gather(value[None], 0, groups)
    others = torch.stack(
        [torch.cat([factors[:i], factors[i + 1 :]]).prod(dim=0) for i in range(count)]
    )
    share = model_collectives.reduce_scatter("sum", others * gradient, 1.0, 0, count, groups)
    return share[0]


class AllReduceSumLayer(Function):
    """The sum over all replicas; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return reduced("sum", [value])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of the gradients."""
        return reduced("sum", [gradient])[0]


class AllGather(Function):
    """``all_gather`` of one tensor; the gradient is every replica's for this slice, summed."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, dim: int, groups: Groups = None
    ) -> torch.Tensor:  # fmt: skip
        """All replicas' values along ``dim``."""
        ctx.details = (dim, groups)
        return model_collectives.all_gather(value, dim, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """This replica's slice of the summed gradients."""
        dim, groups = ctx.details
        count = _group_size(gradient, groups)
        share = model_collectives.reduce_scatter("sum", gradient, 1.0, dim, count, groups)
        return share, None, None


class ReduceScatter(Function):
    """``reduce_scatter`` by ``sum``; the gradient is that of all slices, gathered."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, dim: int, groups: Groups = None
    ) -> torch.Tensor:
        """This replica's slice along ``dim`` of the sum."""
        ctx.details = (dim, groups)
        count = _group_size(value, groups)
        return model_collectives.reduce_scatter("sum", value, 1.0, dim, count, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """The gradients of all slices."""
        return model_collectives.all_gather(gradient, *ctx.details), None, None


class AllToAll(Function):
    """``all_to_all``; the gradient goes back the same way."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, split: int, concat: int, groups: Groups = None
    ) -> torch.Tensor:
        """Slices along ``split`` sent to the replicas, those received along ``concat``."""
        ctx.details = (split, concat, groups)
        return model_collectives.all_to_all(
            value, split, concat, _group_size(value, groups), groups
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """Every slice's gradient, back where it came from."""
        split, concat, groups = ctx.details
        count = _group_size(gradient, groups)
        back = model_collectives.all_to_all(gradient, concat, split, count, groups)
        return back, None, None, None


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None
) -> torch.Tensor:
    """``value`` reduced over the replicas (or its group), times ``scale``; differentiable."""
    return AllReduce.apply(reduce_type, value, scale, groups)


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The values of all replicas side by side along ``dim``; differentiable."""
    return AllGather.apply(value, dim, None)


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """``W @ x``, where every replica holds a block of W's columns and an ``x`` of its own.

    ``w``: (n, k), this replica's columns; ``x``: (k * world size, m); gives (n, m). ``split`` works
    on that many parts of ``x`` along dimension 1, one after the other, to save memory. Differentiable.
    Raises ValueError for sizes that do not fit.
    """
    world = runtime.replica_of(x.device)[1]
    if x.size(0) != w.size(1) * world:
        raise ValueError(
            f"distributed_mm: x has {x.size(0)} rows, w {w.size(1)} columns on each of {world} replicas"
        )
    if x.size(1) % split:
        raise ValueError(f"distributed_mm: {x.size(1)} columns of x cannot be split by {split}")
    parts = [_mm_part(w, part) for part in torch.split(x, x.size(1) // split, dim=1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _mm_part(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Every replica multiplies its columns with the rows that all ``x`` have for them."""
    rows = AllToAll.apply(x, 0, 1, None)
    return ReduceScatter.apply(w @ rows, 1, None)


class SyncBatchNorm(nn.Module):
    """Batch normalization over the batches of all replicas together.

    Takes (batch, ``num_features``, ...); statistics are float32 at least. In evaluation it uses the
    running statistics; the running variance is the unbiased one, as in PyTorch.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The normalized batch. Raises ValueError for another number of features."""
        if batch.dim() < 2 or batch.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) got a batch of shape {tuple(batch.shape)}"
            )
        shape = [1, -1, *[1] * (batch.dim() - 2)]
        mean, var = (
            self._statistics(batch) if self.training else (self.running_mean, self.running_var)
        )
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return (batch * scale.view(shape) + shift.view(shape)).to(batch.dtype)

    def _statistics(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = [0, *range(2, batch.dim())]
        values = batch if batch.dtype == torch.float64 else batch.float()
        world = runtime.replica_of(batch.device)[1]
        sums = torch.stack([values.mean(dim=dims), values.square().mean(dim=dims)])
        mean, square = AllReduceSumLayer.apply(sums) / world
        var = square - mean.square()
        with torch.no_grad():
            count = batch.numel() // batch.size(1) * world
            unbiased = var * (count / max(count - 1, 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, var
