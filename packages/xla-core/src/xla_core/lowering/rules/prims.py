"""PyTorch's primitive operators, as far as graphs from ``torch.compile`` contain them."""

from __future__ import annotations

import torch
from jax import Array

from xla_core.lowering.rules.common import convert
from xla_core.operators.lowering_registry import rule
from xla_core.torch_bridge.dtypes import numpy_dtype


@rule(torch.ops.prims.convert_element_type.default)
def convert_element_type(a: Array, dtype: torch.dtype) -> Array:
    """``a`` in another dtype."""
    return convert(a, numpy_dtype(dtype))
