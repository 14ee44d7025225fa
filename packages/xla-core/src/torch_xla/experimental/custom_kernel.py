"""torch_xla.experimental.custom_kernel: attention and matrix product kernels under torch_xla's names."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.kernels.flash_attention import FlashAttention as FlashAttention
from xla_core.kernels.flash_attention import flash_attention as flash_attention
from xla_core.kernels.grouped_matmul import GMM as GMM
from xla_core.kernels.grouped_matmul import gmm as gmm
from xla_core.kernels.grouped_matmul import gmm_backward as gmm_backward
from xla_core.kernels.grouped_matmul import tgmm as tgmm
from xla_core.kernels.kernel_names import flash_attention_non_xla as flash_attention_non_xla
from xla_core.kernels.kernel_names import generate_ctx_need_grad as generate_ctx_need_grad
from xla_core.kernels.kernel_names import gmm_non_xla as gmm_non_xla
from xla_core.kernels.kernel_names import (
    multi_queries_paged_attention_non_xla as multi_queries_paged_attention_non_xla,
)
from xla_core.kernels.kernel_names import non_xla_attetion as non_xla_attetion
from xla_core.kernels.kernel_names import (
    non_xla_ragged_paged_attention as non_xla_ragged_paged_attention,
)
from xla_core.kernels.kernel_names import paged_attention_non_xla as paged_attention_non_xla
from xla_core.kernels.kernel_names import (
    quantized_matmul_int8_non_xla as quantized_matmul_int8_non_xla,
)
from xla_core.kernels.kernel_names import (
    ragged_paged_attention_non_xla as ragged_paged_attention_non_xla,
)
from xla_core.kernels.kernel_names import ragged_paged_attention_xla as ragged_paged_attention_xla
from xla_core.kernels.kernel_names import (
    repeat_with_fixed_output_size as repeat_with_fixed_output_size,
)
from xla_core.kernels.kernel_names import safe_empty_like as safe_empty_like
from xla_core.kernels.kernel_operator import MASK_VALUE as DEFAULT_MASK_VALUE
from xla_core.kernels.paged_attention import (
    multi_queries_paged_attention as multi_queries_paged_attention,
)
from xla_core.kernels.paged_attention import paged_attention as paged_attention
from xla_core.kernels.paged_attention import ragged_paged_attention as ragged_paged_attention
from xla_core.kernels.pallas import convert_torch_dtype_to_jax as convert_torch_dtype_to_jax
from xla_core.kernels.pallas import make_kernel_from_pallas as make_kernel_from_pallas
from xla_core.kernels.pallas import to_jax_shape_dtype_struct as to_jax_shape_dtype_struct
from xla_core.kernels.pallas import trace_pallas as trace_pallas
from xla_core.kernels.quantized import quantized_matmul_int8 as quantized_matmul_int8
from xla_core.torch_bridge.op_library import XLA_LIB as XLA_LIB
from xla_core.torch_features.jax_coexistence import jax_import_guard as jax_import_guard
from xla_core.torch_features.jax_coexistence import requires_jax as requires_jax

flash_attention_xla = flash_attention
gmm_xla = gmm
multi_queries_paged_attention_xla = multi_queries_paged_attention
paged_attention_xla = paged_attention
quantized_matmul_int8_xla = quantized_matmul_int8

__getattr__, __dir__ = lazy_names(__name__, {"Mesh": "xla_spmd.sharding.mesh"})
