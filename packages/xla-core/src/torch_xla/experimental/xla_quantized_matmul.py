"""torch_xla.experimental.xla_quantized_matmul: linear layers with weights of 8 or 4 bits."""

from __future__ import annotations

from xla_core.kernels.quantized_linear import XlaQuantizedLinear as XlaQuantizedLinear
from xla_core.kernels.quantized_linear import quantized_matmul as quantized_matmul
from xla_core.torch_bridge.op_library import XLA_LIB as XLA_LIB
from xla_core.torch_bridge.op_library import load_quantized_operators as _load_quantized_operators

_load_quantized_operators()
quantized_matmul_xla = quantized_matmul
