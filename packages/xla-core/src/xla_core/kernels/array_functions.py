"""torch_xla's kernels as functions on jax arrays, and the helpers of their module.

These functions compute with plain operations of jax. The operators of the same names on ``xla`` tensors use kernels
if the device has them.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import Array

from xla_core.kernels.kernel_operator import MASK_VALUE
from xla_core.kernels.paged_attention import lower_multi_queries, lower_ragged
from xla_core.kernels.quantized import lower as lower_quantized
from xla_core.torch_bridge.operands import Operand

MAX_PAGES_PER_SEQ: Final = 16


def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    lengths: Array,
    page_indices: Array,
    effective_q_lens: Array,
    *,
    mask_value: float | None = MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    num_kv_pages_per_compute_block: int = 1,
    num_queries_per_compute_block: int = 4,
    **_blocks: object,
) -> Array:
    """``multi_queries_paged_attention`` of jax arrays; block sizes and ``mask_value`` have no effect."""
    del mask_value
    return lower_multi_queries(
        q, k_pages, v_pages, lengths, page_indices, effective_q_lens,
        num_kv_pages_per_compute_block, num_queries_per_compute_block, False, attn_logits_soft_cap,
    )  # fmt: skip


def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **_blocks: object,
) -> Array:
    """The operator ``ragged_paged_attention``, attention of sequences of different lengths, on jax arrays."""
    return lower_ragged(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs,
        sm_scale, sliding_window, soft_cap, mask_value, k_scale, v_scale, False,
    )  # fmt: skip


def ref_ragged_paged_attention(
    queries: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    **options: Operand,
) -> Array:
    """``ragged_paged_attention`` with ``queries`` as the name of the first operand."""
    return ragged_paged_attention(
        queries, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, **options
    )


def quantized_matmul_int8(
    x: Array,
    w: Array,
    scalar: Array,
    zero_point: Array | None = None,
    quant_block_size: Array | None = None,
    quantize_activation: bool = False,
    **_blocks: object,
) -> Array:
    """``(x @ w.T) * scalar`` with int8 weights on jax arrays, in the dtype of ``x``.

    ``x`` is (rows, inner), ``w`` (columns, inner) and ``scalar`` (columns,). With ``quantize_activation`` (default:
    False) the rows of ``x`` are rounded to int8, too. Raises NotImplementedError for ``zero_point`` and
    ``quant_block_size``.
    """
    if zero_point is not None or quant_block_size is not None:
        raise NotImplementedError(
            "quantized_matmul_int8 has one scale per output and no zero point"
        )
    return lower_quantized(x, w, scalar, None, None, quantize_activation).astype(x.dtype)


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def next_power_of_2(x: int) -> int:
    """The least power of two that is at least ``x``. Raises ValueError unless ``x`` is positive."""
    if x < 1:
        raise ValueError(f"next_power_of_2({x}): give a positive number")
    return 1 << (x - 1).bit_length()


def get_dtype_packing(dtype: jax.typing.DTypeLike) -> int:
    """How many elements of ``dtype`` fit into 32 bits, at least 1."""
    return max(1, 32 // (jnp.dtype(dtype).itemsize * 8))


def get_min_page_size(max_model_len: int, min_page_size: int = 16) -> int:
    """The smallest page size, at least ``min_page_size``, with at most ``MAX_PAGES_PER_SEQ`` pages per sequence."""
    return max(next_power_of_2(max_model_len) // MAX_PAGES_PER_SEQ, min_page_size)


def get_tpu_version() -> int:
    """The generation of jax's first device: 5 for a ``TPU v5e``, -1 if it is not a TPU."""
    kind = jax.devices()[0].device_kind
    digits = [c for c in kind.removeprefix("TPU") if c.isdigit()]
    return int(digits[0]) if kind.startswith("TPU") and digits else -1


def get_device_name(num_devices: int | None = None) -> str:
    """The name of jax's first device, followed by ``-`` and ``num_devices`` if that is given."""
    kind = " ".join(jax.devices()[0].device_kind.split()[:2])
    return kind if num_devices is None else f"{kind}-{num_devices}"
