"""Products of groups of rows, each with a matrix of its own, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch.autograd.function import FunctionCtx, once_differentiable

from xla_core.dynamo.dynamo_backend import kept_in_graphs
from xla_core.jax_bridge import pallas_kernels
from xla_core.kernels.kernel_operator import (
    LANES,
    call_kernel,
    for_tpu,
    operator,
    padded,
    rounded_up,
    wide,
)
from xla_core.torch_bridge.op_library import XLA_LIB
from xla_core.torch_bridge.operands import Gradients, Operand

MSG_RANK: Final = "{name} of {function} has {got} dimensions; it needs {wanted}"

# The most rows and columns of a tile; tiles of this size fit into a TPU's fast memory.
_MOST_ROWS: Final = 512
_MOST_COLUMNS: Final = 2048


@kept_in_graphs
def gmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: tuple[int, int, int] | None = None,
    group_offset: torch.Tensor | None = None,
    transpose_rhs: bool = False,
) -> torch.Tensor:
    """``lhs[rows of group i] @ rhs[i]`` for each group: (m, k) and (groups, k, n) give (m, n).

    ``group_sizes`` are integers (groups,): the numbers of consecutive rows in each group. Rows after the last group
    give zeros. With ``group_offset``, an integer tensor of shape (), ``rhs`` holds only the groups from that number
    on. With ``transpose_rhs`` (default: False) ``rhs`` is (groups, n, k). ``tiling`` (default: chosen by the sizes)
    are the TPU kernel's rows, inner length and columns of a tile. Differentiable once. Raises ValueError for
    operands of other ranks.
    """
    _check("gmm", lhs=(lhs, 2), rhs=(rhs, 3), group_sizes=(group_sizes, 1))
    return torch.ops.xla.gmm(lhs, rhs, group_sizes, tiling, group_offset, transpose_rhs)


@kept_in_graphs
def tgmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: tuple[int, int, int] = (512, 512, 512),
    group_offset: torch.Tensor | None = None,
    num_actual_groups: int | None = None,
) -> torch.Tensor:
    """``lhs[:, columns of group i] @ rhs[rows of group i]`` for each group: (k, m) and (m, n) give (groups, k, n).

    ``group_sizes`` and ``tiling`` are those of ``gmm``. With ``group_offset``, an integer tensor of shape (), the
    result has ``num_actual_groups`` groups (default: all) from that number on. Not differentiable. Raises
    ValueError for operands of other ranks.
    """
    _check("tgmm", lhs=(lhs, 2), rhs=(rhs, 2), group_sizes=(group_sizes, 1))
    return torch.ops.xla.tgmm(lhs, rhs, group_sizes, tiling, group_offset, num_actual_groups)


def gmm_backward(
    grad: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: tuple[int, int, int] = (512, 512, 512),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``gmm(lhs, rhs, group_sizes, tiling)`` by ``lhs`` and ``rhs``, from that of its result."""
    by_lhs = gmm(grad, rhs, group_sizes, tiling, transpose_rhs=True)
    return by_lhs, tgmm(lhs.t(), grad, group_sizes, tiling)


class GMM(torch.autograd.Function):
    """``gmm`` as ``GMM.apply(lhs, rhs, group_sizes, tiling)``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        group_sizes: torch.Tensor,
        tiling: tuple[int, int, int] = (512, 512, 512),
    ) -> torch.Tensor:
        """The product."""
        ctx.save_for_backward(lhs, rhs, group_sizes)
        ctx.tiling = tiling
        return gmm(lhs, rhs, group_sizes, tiling)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradients of ``lhs`` and ``rhs``."""
        lhs, rhs, group_sizes = ctx.saved_tensors
        derivatives = gmm_backward(gradients[0], lhs, rhs, group_sizes, ctx.tiling)
        return *derivatives, None, None


def _check(function: str, **operands: tuple[torch.Tensor, int]) -> None:
    for name, (tensor, rank) in operands.items():
        if tensor.dim() != rank:
            raise ValueError(
                MSG_RANK.format(name=name, function=function, got=tensor.dim(), wanted=rank)
            )


# -- the operators --------------------------------------------------------------------------------


def _gmm_meta(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: Sequence[int] | None = None,
    group_offset: torch.Tensor | None = None,
    transpose_rhs: bool = False,
) -> torch.Tensor:
    return lhs.new_empty(lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])


def _tgmm_meta(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: Sequence[int] | None = None,
    group_offset: torch.Tensor | None = None,
    num_actual_groups: int | None = None,
) -> torch.Tensor:
    groups = group_sizes.shape[0] if num_actual_groups is None else num_actual_groups
    return lhs.new_empty(groups, lhs.shape[0], rhs.shape[1])


@operator(
    "gmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int[]? tiling=None, Tensor? group_offset=None, "
    "bool transpose_rhs=False) -> Tensor",
    _gmm_meta,
)
def lower_gmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    tiling: Sequence[int] | None = None,
    group_offset: Array | None = None,
    transpose_rhs: bool = False,
) -> Array:
    """``gmm`` by the TPU's kernel, or as XLA's ragged product."""
    tpu = for_tpu(_multiplies(lhs, rhs), "gmm")
    if tpu is not None:
        rows, groups = lhs.shape[0], rhs.shape[0]
        n = rhs.shape[1 if transpose_rhs else 2]
        tiles = _tiles(tiling, rows, lhs.shape[1], n, groups)
        products = call_kernel(
            tpu, pallas_kernels.grouped_products().gmm,
            padded(lhs, 0, rounded_up(rows, tiles[0])), rhs, group_sizes,
            preferred_element_type=lhs.dtype, tiling=tiles,
            group_offset=_narrow(group_offset), transpose_rhs=transpose_rhs,
        )[:rows]  # fmt: skip
        # the kernel does not write the rows after the last group
        inside = jnp.arange(rows) < group_sizes.sum()
        return jnp.where(inside[:, None], products, 0)
    matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    if group_offset is not None:
        everything = jnp.zeros((group_sizes.shape[0], *matrices.shape[1:]), matrices.dtype)
        start = group_offset.reshape(())
        matrices = lax.dynamic_update_slice_in_dim(everything, matrices, start, 0)
    return lax.ragged_dot(
        lhs, matrices, group_sizes.astype(jnp.int32), preferred_element_type=wide(lhs)
    )


@operator(
    "tgmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int[]? tiling=None, Tensor? group_offset=None, "
    "int? num_actual_groups=None) -> Tensor",
    _tgmm_meta,
)
def lower_tgmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    tiling: Sequence[int] | None = None,
    group_offset: Array | None = None,
    num_actual_groups: int | None = None,
) -> Array:
    """``tgmm`` by the TPU's kernel, or as one product in which the rows of other groups are zeros."""
    groups = group_sizes.shape[0] if num_actual_groups is None else num_actual_groups
    rows = rhs.shape[0]
    tpu = for_tpu(_multiplies(lhs, rhs), "tgmm")
    if tpu is not None:
        tiles = _tiles(tiling, rows, lhs.shape[0], rhs.shape[1], groups)
        whole = rounded_up(rows, tiles[0])
        return call_kernel(
            tpu, pallas_kernels.grouped_products().tgmm,
            padded(lhs, 1, whole), padded(rhs, 0, whole), group_sizes,
            preferred_element_type=lhs.dtype, tiling=tiles,
            group_offset=_narrow(group_offset), num_actual_groups=num_actual_groups,
        )  # fmt: skip
    ends = jnp.cumsum(group_sizes)
    offset = jnp.zeros((), ends.dtype) if group_offset is None else group_offset.reshape(())
    wanted = lax.dynamic_slice(ends, (offset,), (groups,))
    sizes = lax.dynamic_slice(group_sizes, (offset,), (groups,))
    row = jnp.arange(rows)[None]
    inside = (row < wanted[:, None]) & (row >= (wanted - sizes)[:, None])
    return jnp.einsum(
        "km,gm,mn->gkn", lhs, inside.astype(lhs.dtype), rhs, preferred_element_type=wide(lhs)
    )


def _multiplies(lhs: Array, rhs: Array) -> bool:
    """Whether the kernels support these operands: two dtypes, and sizes of at least a register's lanes."""
    dtypes = (jnp.float32, jnp.bfloat16)
    return lhs.dtype == rhs.dtype and lhs.dtype in dtypes and min(rhs.shape[-2:]) >= LANES


def _narrow(group_offset: Array | None) -> Array | None:
    return None if group_offset is None else group_offset.astype(jnp.int32).reshape(())


def _tiles(
    wanted: Sequence[int] | None, rows: int, inner: int, columns: int, groups: int
) -> tuple[int, int, int]:
    """Tile sizes in whole lanes: those that are wanted, or twice the average group by as much as fits."""
    if wanted is None:
        wanted = (min(2 * rows // groups, _MOST_ROWS), _MOST_COLUMNS, _MOST_COLUMNS)
    lengths = (rows, inner, columns)
    tm, tk, tn = (
        rounded_up(max(1, min(w, n)), LANES) for w, n in zip(wanted, lengths, strict=True)
    )
    return tm, tk, tn


# -- gradients ------------------------------------------------------------------------------------


def _setup(ctx: FunctionCtx, inputs: tuple[Operand, ...], output: Operand) -> None:
    lhs, rhs, group_sizes, ctx.tiling, group_offset, ctx.transpose_rhs = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes, group_offset)


@once_differentiable  # type: ignore[untyped-decorator]
def _backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    lhs, rhs, sizes, offset = ctx.saved_tensors
    by_lhs = by_rhs = None
    tiling = ctx.tiling or (_MOST_ROWS, _MOST_ROWS, _MOST_ROWS)
    if ctx.needs_input_grad[0]:
        by_lhs = gmm(grad, rhs, sizes, ctx.tiling, offset, not ctx.transpose_rhs)
    if ctx.needs_input_grad[1]:
        left, right = (grad, lhs) if ctx.transpose_rhs else (lhs, grad)
        by_rhs = tgmm(left.t(), right, sizes, tiling, offset, rhs.shape[0])
    return by_lhs, by_rhs, None, None, None, None


torch.library.register_autograd("xla::gmm", _backward, setup_context=_setup, lib=XLA_LIB)
