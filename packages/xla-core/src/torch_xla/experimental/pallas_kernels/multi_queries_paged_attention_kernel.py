"""torch_xla.experimental.pallas_kernels.multi_queries_paged_attention_kernel: attention over pages."""

from __future__ import annotations

from xla_core.kernels.array_functions import paged_attention as paged_attention
from xla_core.kernels.kernel_operator import MASK_VALUE as DEFAULT_MASK_VALUE
