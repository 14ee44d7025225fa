"""PyTorch's primitive operators, as far as graphs from ``torch.compile`` contain them."""

from __future__ import annotations

import torch
from jax import Array

from xla_core.dtypes import numpy_dtype
from xla_core.lowering.registry import rule
from xla_core.lowering.rules.common import convert


@rule(torch.ops.prims.convert_element_type.default)
def convert_element_type(a: Array, dtype: torch.dtype) -> Array:
    """``a`` in another dtype."""
    return convert(a, numpy_dtype(dtype))
