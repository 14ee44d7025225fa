"""torch_xla.experimental.pallas_kernels.quantized_matmul_kernel: products with 8-bit weights."""

from __future__ import annotations

from xla_core.kernels.array_functions import get_tpu_version as get_tpu_version
from xla_core.kernels.array_functions import quantized_matmul_int8 as quantized_matmul_int8
