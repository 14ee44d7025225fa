"""``dot_general``: products over any dimensions, whose result may have another dtype than the operands.

Unlike PyTorch's matrix products it can sum products of int8 in int32, and take any dimensions as batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from jax import Array, lax

from xla_core.dynamo.dynamo_backend import kept_in_graphs
from xla_core.kernels.kernel_operator import operator
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.dtypes import NUMPY_DTYPES

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""``((contracted of lhs, of rhs), (batches of lhs, of rhs))``, each a list of dimensions."""

PRECISIONS: Final = ("default", "high", "highest")
MSG_PRECISION: Final = "dot_general: precision_config is {got!r}; give one of {known}, or None"
MSG_NOT_XLA: Final = (
    "dot_general takes two tensors on an xla device, got one on {device}; move it there first, or use "
    "torch.tensordot or torch.einsum"
)
MSG_SIZES: Final = (
    "dot_general: dimension {left} of lhs {lhs} is paired with dimension {right} of rhs {rhs}, which has another "
    "size"
)
MSG_COUNTS: Final = (
    "dot_general: {lhs} dimensions of lhs and {rhs} of rhs are {kind}; give as many of each"
)


@kept_in_graphs
def dot_general(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    dimension_numbers: Dimensions,
    precision_config: str | None = None,
    preferred_element_type: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of two tensors; its dimensions are the batches, then the rest of ``lhs``, then that of ``rhs``.

    Dimensions may be negative. The result has the dtype ``preferred_element_type`` (default: the operands' common
    dtype), in which products are summed. ``precision_config`` is ``"DEFAULT"``, ``"HIGH"``, ``"HIGHEST"`` or None
    (default: as set for the process). Not differentiable. Raises RuntimeError for a tensor that is not on an
    ``xla`` device, ValueError for dimensions that do not fit and for another precision.
    """
    for tensor in (lhs, rhs):
        if not torch.compiler.is_compiling() and not isinstance(tensor, XLATensor):
            raise RuntimeError(MSG_NOT_XLA.format(device=tensor.device))
    if precision_config is not None and precision_config.lower() not in PRECISIONS:
        raise ValueError(
            MSG_PRECISION.format(got=precision_config, known=", ".join(PRECISIONS).upper())
        )
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    pairs = []
    for kind, left, right in (
        ("contracted", lhs_contracting, rhs_contracting),
        ("batches", lhs_batch, rhs_batch),
    ):
        if len(left) != len(right):
            raise ValueError(MSG_COUNTS.format(lhs=len(left), rhs=len(right), kind=kind))
        pairs.append(_paired(lhs, rhs, left, right))
    (contract_l, contract_r), (batch_l, batch_r) = pairs
    precision = None if precision_config is None else precision_config.lower()
    result: torch.Tensor = torch.ops.xla.dot_general(
        lhs, rhs, contract_l, contract_r, batch_l, batch_r, precision, preferred_element_type
    )
    return result


def _paired(
    lhs: torch.Tensor, rhs: torch.Tensor, left: Sequence[int], right: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The dimensions as non-negative numbers. Raises ValueError if two that are paired have different sizes."""
    for a, b in zip(left, right, strict=True):
        if lhs.shape[a] != rhs.shape[b]:
            shapes = {"lhs": tuple(lhs.shape), "rhs": tuple(rhs.shape)}
            raise ValueError(MSG_SIZES.format(left=a, right=b, **shapes))
    return [a % lhs.dim() for a in left], [b % rhs.dim() for b in right]


def _meta(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    lhs_contracting: list[int],
    rhs_contracting: list[int],
    lhs_batch: list[int],
    rhs_batch: list[int],
    precision: str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    shape = [lhs.shape[i] for i in lhs_batch]
    for tensor, used in ((lhs, lhs_contracting + lhs_batch), (rhs, rhs_contracting + rhs_batch)):
        shape += [n for i, n in enumerate(tensor.shape) if i not in used]
    return lhs.new_empty(shape, dtype=dtype or torch.promote_types(lhs.dtype, rhs.dtype))


@operator(
    "dot_general(Tensor lhs, Tensor rhs, int[] lhs_contracting, int[] rhs_contracting, int[] lhs_batch, "
    "int[] rhs_batch, str? precision=None, ScalarType? dtype=None) -> Tensor",
    _meta,
)
def lower(
    lhs: Array,
    rhs: Array,
    lhs_contracting: Sequence[int],
    rhs_contracting: Sequence[int],
    lhs_batch: Sequence[int],
    rhs_batch: Sequence[int],
    precision: str | None = None,
    dtype: torch.dtype | None = None,
) -> Array:
    """HLO's operation of the same name."""
    preferred: object = None if dtype is None else NUMPY_DTYPES[dtype]
    numbers = (
        (tuple(lhs_contracting), tuple(rhs_contracting)),
        (tuple(lhs_batch), tuple(rhs_batch)),
    )
    return lax.dot_general(lhs, rhs, numbers, precision=precision, preferred_element_type=preferred)
