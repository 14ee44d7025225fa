"""Differentiable collectives (``torch_xla.core.functions``).

All replicas run the same program, so a gradient is the gradient of the sum of all replicas' losses.
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
    """``all_reduce`` of one tensor. The reductions ``sum``, ``min``, ``max`` and ``mul`` have gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, reduce_type: str, value: torch.Tensor, scale: float, groups: Groups
    ) -> torch.Tensor:
        """The reduction of ``value`` over each of ``groups``, times ``scale``."""
        (result,) = reduced(reduce_type, [value], groups)
        ctx.arguments = (reduce_type, scale, groups)
        if reduce_type != "sum":
            ctx.save_for_backward(value, result)
        return result if scale == 1.0 else result * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """The sum of all replicas' gradients; replicas that attain a minimum or maximum share it equally.

        Raises RuntimeError for ``and`` and ``or``.
        """
        kind, scale, groups = ctx.arguments
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
    """The gradient of a product: that of each factor is the product of the other replicas' factors.

    Computed as such a product rather than as the result divided by the factor, which may be 0.
    """
    count = _group_size(value, groups)
    factors = model_collectives.all_gather(value[None], 0, groups)
    others = torch.stack(
        [torch.cat([factors[:i], factors[i + 1 :]]).prod(dim=0) for i in range(count)]
    )
    share = model_collectives.reduce_scatter("sum", others * gradient, 1.0, 0, count, groups)
    return share[0]


class AllReduceSumLayer(Function):
    """The sum over all replicas; its gradient is the sum of all replicas' gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        """The sum of all replicas' ``value``."""
        return reduced("sum", [value])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of all replicas' ``gradient``."""
        return reduced("sum", [gradient])[0]


class AllGather(Function):
    """``all_gather`` of one tensor; its gradient is the sum of all replicas' gradients of this replica's slice."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, dim: int, groups: Groups = None
    ) -> torch.Tensor:  # fmt: skip
        """The values of the group's replicas, concatenated along ``dim``."""
        ctx.arguments = (dim, groups)
        return model_collectives.all_gather(value, dim, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """This replica's slice of the sum of the gradients."""
        dim, groups = ctx.arguments
        count = _group_size(gradient, groups)
        share = model_collectives.reduce_scatter("sum", gradient, 1.0, dim, count, groups)
        return share, None, None


class ReduceScatter(Function):
    """``reduce_scatter`` by ``sum``; its gradient is the concatenation of all slices' gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, dim: int, groups: Groups = None
    ) -> torch.Tensor:
        """This replica's slice along ``dim`` of the group's sum."""
        ctx.arguments = (dim, groups)
        count = _group_size(value, groups)
        return model_collectives.reduce_scatter("sum", value, 1.0, dim, count, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """The gradients of all slices, concatenated."""
        return model_collectives.all_gather(gradient, *ctx.arguments), None, None


class AllToAll(Function):
    """``all_to_all``; its gradient is an ``all_to_all`` in the opposite direction."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, split: int, concat: int, groups: Groups = None
    ) -> torch.Tensor:
        """Send slices along ``split`` to the group's replicas.

        The received slices, concatenated along ``concat``.
        """
        ctx.arguments = (split, concat, groups)
        return model_collectives.all_to_all(
            value, split, concat, _group_size(value, groups), groups
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Gradients:
        """The gradient of each slice, sent back to the replica that the slice came from."""
        split, concat, groups = ctx.arguments
        count = _group_size(gradient, groups)
        back = model_collectives.all_to_all(gradient, concat, split, count, groups)
        return back, None, None, None


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None
) -> torch.Tensor:
    """``value`` reduced over all replicas, or over each of ``groups``, times ``scale``; differentiable.

    ``reduce_type`` is ``sum``, ``mul``, ``and``, ``or``, ``min`` or ``max``; ``and`` and ``or`` have no gradient.
    ``groups`` is a list of lists of ordinals (default: one of all).
    """
    return AllReduce.apply(reduce_type, value, scale, groups)


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The values of all replicas, concatenated along ``dim`` (default: 0); differentiable."""
    return AllGather.apply(value, dim, None)


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """``W @ x``, where each replica holds some columns of the matrix W, and has an ``x`` of its own.

    ``w`` are this replica's columns, of shape (n, k); ``x`` has the shape (k * world size, m), the result
    (n, m). ``split`` (default: 1) is the number of parts into which ``x`` is split along dimension 1; they are
    multiplied one after the other, to save memory. Differentiable. Raises ValueError for sizes that do not fit.
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
    """Multiply this replica's columns with the matching rows of all replicas' ``x``, and sum the products."""
    rows = AllToAll.apply(x, 0, 1, None)
    return ReduceScatter.apply(w @ rows, 1, None)


class SyncBatchNorm(nn.Module):
    """Batch normalization with the statistics of all replicas' batches together.

    Takes a tensor of shape (batch, ``num_features``, ...) of the same size on each replica, and returns one of the
    same shape and dtype. It computes statistics in float32, or in float64 for float64. ``eps`` (default: 1e-5) is
    added to the variance, and ``momentum`` (default: 0.1) is the weight of a new batch in the running statistics,
    which it uses in evaluation. As in PyTorch, the running variance is unbiased.
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
        """The normalized ``batch``. Raises ValueError if its dimension 1 is not ``num_features``."""
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
