"""torch_xla.experimental.pallas_kernels.ragged_paged_attention_v2: attention of sequences of different lengths."""

from __future__ import annotations

from xla_core.kernels.array_functions import MAX_PAGES_PER_SEQ as MAX_PAGES_PER_SEQ
from xla_core.kernels.array_functions import cdiv as cdiv
from xla_core.kernels.array_functions import get_device_name as get_device_name
from xla_core.kernels.array_functions import get_dtype_packing as get_dtype_packing
from xla_core.kernels.array_functions import get_min_page_size as get_min_page_size
from xla_core.kernels.array_functions import get_tpu_version as get_tpu_version
from xla_core.kernels.array_functions import next_power_of_2 as next_power_of_2
from xla_core.kernels.array_functions import ragged_paged_attention as ragged_paged_attention
from xla_core.kernels.array_functions import (
    ref_ragged_paged_attention as ref_ragged_paged_attention,
)
from xla_core.kernels.kernel_operator import MASK_VALUE as DEFAULT_MASK_VALUE
