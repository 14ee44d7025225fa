"""Products of groups of rows or columns with a matrix each: the layers of a mixture of experts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.matmul import accumulator, product
from xla_core.operators.lowering_registry import aten, rule

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows of the left operand in groups, a matrix of the right one for each.
_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# The dimension summed over in groups, a product for each.
_SUMMED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())),
    lhs_ragged_dimensions=[1],
    rhs_group_dimensions=[],
)


def _grouped_mm_meta(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # torch 2.13: its meta kernel takes bfloat16 alone, and asks for strides that GPUs' kernels need
    valid = (
        self.dim() in (2, 3)
        and mat2.dim() in (2, 3)
        and self.size(-1) == mat2.size(-2)
        and self.dtype == mat2.dtype
        and self.dtype in _DTYPES
        and bias is None
        and out_dtype in (None, self.dtype)
    )
    groups = {x.size(0) for x in (self, mat2) if x.dim() == 3}
    if self.dim() == mat2.dim() == 3:
        valid = valid and offs is None
    else:
        valid = valid and offs is not None and offs.dim() == 1 and offs.dtype == torch.int32
        groups |= {offs.size(0)} if offs is not None and offs.dim() == 1 else set()
    if not valid or len(groups) != 1:
        raise RuntimeError("operands of a grouped product do not fit")  # the CPU's words replace it
    lead = tuple(groups) if self.dim() == mat2.dim() else ()
    return self.new_empty((*lead, self.size(-2), mat2.size(-1)))


@rule(aten._grouped_mm.default, meta=_grouped_mm_meta)
def grouped_mm(
    self: Array,
    mat2: Array,
    offs: Array | None = None,
    bias: Array | None = None,
    out_dtype: torch.dtype | None = None,
) -> Array:
    """``self @ mat2`` in groups that end at ``offs``.

    With ``mat2`` of three dimensions its matrices multiply groups of rows of ``self``, with ``self`` of three
    dimensions groups of columns of ``mat2``; with two dimensions each, the dimension summed over is in groups, and
    every group gives a matrix. Rows and columns behind the last group are zero.
    """
    if offs is None:
        return product(self, mat2).astype(self.dtype)
    sizes = jnp.diff(offs, prepend=np.int32(0))
    if self.ndim == 3:  # columns are the rows of the product of what is transposed
        columns = _ragged(mat2.T, jnp.swapaxes(self, 1, 2), sizes, _ROWS)
        return columns.T.astype(self.dtype)
    return _ragged(self, mat2, sizes, _ROWS if mat2.ndim == 3 else _SUMMED).astype(self.dtype)


def _ragged(
    left: Array, right: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers
) -> Array:
    wide = accumulator(left.dtype)
    return lax.ragged_dot_general(left, right, sizes, numbers, preferred_element_type=wide)
