"""torch_xla.experimental.pallas_kernels.ragged_paged_attention_kernel: ragged attention."""

from __future__ import annotations

from xla_core.kernels.array_functions import ragged_paged_attention as ragged_paged_attention
from xla_core.kernels.kernel_operator import MASK_VALUE as DEFAULT_MASK_VALUE
