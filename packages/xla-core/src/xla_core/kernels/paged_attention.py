"""Attention to keys and values in the pages of a cache, as servers of language models keep them.

``multi_queries_paged_attention``, and the others for shapes that jax's kernels do not support, gather all pages of
a sequence at once.
"""

from __future__ import annotations

import functools
from typing import Final

import jax.numpy as jnp
import torch
from jax import Array, lax

from xla_core.dynamo.dynamo_backend import kept_in_graphs
from xla_core.jax_bridge import pallas_kernels
from xla_core.kernels.kernel_operator import (
    LANES,
    MASK_VALUE,
    call_kernel,
    capped,
    for_tpu,
    operator,
    weights_of,
    wide,
)
from xla_core.torch_bridge.operands import Operand

MSG_MEGACORE: Final = "megacore_mode is {got!r}; it is 'kv_head', 'batch' or None"
MSG_HEADS: Final = "{queries} heads of queries cannot share {keys} heads of keys evenly"
MSG_RAGGED: Final = "ragged_paged_attention: {problem}"

# The keys and queries in one block of the ragged kernel by default.
_KEYS_PER_BLOCK: Final = 128
_QUERIES_PER_BLOCK: Final = 32
_VMEM_BYTES: Final = 120 * 1024 * 1024


@kept_in_graphs
def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence to the first ``lengths`` keys of the sequence.

    ``q`` is (batch, heads, head size), ``lengths`` integers (batch,), the pages (key heads, pages, page size, head
    size), and ``page_indices`` (batch, pages per sequence) lists the pages of each sequence in order. Scores are
    not scaled; with ``attn_logits_soft_cap`` (default: None) they become ``cap * tanh(score / cap)``.
    ``pages_per_compute_block``, a divisor of the pages per sequence, and ``megacore_mode`` (``'kv_head'``,
    ``'batch'`` or None) tune the TPU's kernel, which rounds keys and values to bfloat16. Not differentiable. Raises
    ValueError for another mode, and if the key heads do not divide the heads.
    """
    if megacore_mode not in (None, "kv_head", "batch"):
        raise ValueError(MSG_MEGACORE.format(got=megacore_mode))
    _check_heads(q.shape[1], k_pages.shape[0])
    return torch.ops.xla.paged_attention(
        q, k_pages, v_pages, lengths, page_indices,
        pages_per_compute_block, megacore_mode, attn_logits_soft_cap,
    )  # fmt: skip


@kept_in_graphs
def multi_queries_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    effective_q_lens: torch.Tensor,
    num_kv_pages_per_compute_block: int,
    num_queries_per_compute_block: int,
    use_kernel: bool = True,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """``paged_attention`` with several queries per sequence: ``q`` is (batch, queries, heads, head size).

    The last of the ``effective_q_lens`` queries of a sequence has the position of its last key, and each query sees
    the keys up to its own position. jax has no kernel for this, so the block sizes and ``use_kernel`` have no
    effect. Not differentiable. Raises ValueError if the key heads do not divide the heads.
    """
    _check_heads(q.shape[2], k_pages.shape[0])
    return torch.ops.xla.multi_queries_paged_attention(
        q, k_pages, v_pages, lengths, page_indices, effective_q_lens,
        num_kv_pages_per_compute_block, num_queries_per_compute_block, use_kernel,
        attn_logits_soft_cap,
    )  # fmt: skip


@kept_in_graphs
def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """Attention of sequences of different lengths, whose queries are concatenated: ``q`` is (tokens, heads, size).

    Pages are (pages, page size, 2 * key heads, size), with keys and values alternating. Sequence i has the queries
    from ``cu_q_lens[i]`` to ``cu_q_lens[i + 1]`` and ``kv_lens[i]`` keys. Its last query sees all keys, and earlier
    queries see the keys up to their own position, or the last ``sliding_window`` of these. The first ``num_seqs``
    (a tensor of one element) sequences are computed; rows of ``q`` without a sequence give zeros on all devices but
    TPUs, where their results are undefined. Scores are multiplied by ``sm_scale`` (default: 1), keys and values by
    ``k_scale`` and ``v_scale``. With ``use_kernel=False`` the lengths are read and checked, and only rows of
    sequences are returned. Not differentiable. Raises ValueError if the key heads do not divide the heads and, with
    ``use_kernel=False``, for lengths that do not fit.
    """
    _check_heads(q.shape[1], kv_pages.shape[2] // 2)
    result = torch.ops.xla.ragged_paged_attention(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale, sliding_window, soft_cap,
        mask_value, k_scale, v_scale, use_kernel,
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes,
    )  # fmt: skip
    if use_kernel:
        return result
    return result[: _checked_rows(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)]


def _check_heads(queries: int, keys: int) -> None:
    if not keys or queries % keys:
        raise ValueError(MSG_HEADS.format(queries=queries, keys=keys))


def _checked_rows(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
) -> int:
    """How many rows of ``q`` belong to sequences. Raises ValueError for lengths that do not fit."""
    count = int(num_seqs)
    most, pages = page_indices.shape
    if count > most:
        raise ValueError(MSG_RAGGED.format(problem=f"{count} sequences, with pages for {most}"))
    lengths, ends = kv_lens.cpu()[:count], cu_q_lens.cpu()[: count + 1]
    room = pages * kv_pages.shape[1]
    if count and int(lengths.max()) > room:
        text = f"a sequence has {int(lengths.max())} keys, but its pages have room for {room}"
        raise ValueError(MSG_RAGGED.format(problem=text))
    if int(ends[-1]) > q.shape[0]:
        text = f"the sequences have {int(ends[-1])} queries, but q has {q.shape[0]} rows"
        raise ValueError(MSG_RAGGED.format(problem=text))
    longer = (ends.diff() > lengths).nonzero().flatten().tolist()
    if longer:
        raise ValueError(
            MSG_RAGGED.format(problem=f"sequence {longer[0]} has more queries than keys")
        )
    return int(ends[-1])


# -- the operators --------------------------------------------------------------------------------


def _like_queries(q: torch.Tensor, *_rest: object, **_named: object) -> torch.Tensor:
    return torch.empty_like(q)


@operator(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor lengths, Tensor page_indices, "
    "int pages_per_compute_block, str? megacore_mode=None, float? attn_logits_soft_cap=None) -> Tensor",
    _like_queries,
)
def lower_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    lengths: Array,
    page_indices: Array,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Array:
    """``paged_attention`` by jax's kernel, or as a softmax over all pages."""
    tpu = for_tpu(q.shape[-1] % LANES == 0, "paged_attention")
    if tpu is not None:
        return call_kernel(
            tpu, pallas_kernels.paged_attention(), q, k_pages, v_pages, lengths, page_indices,
            pages_per_compute_block=pages_per_compute_block,
            megacore_mode=megacore_mode,
            attn_logits_soft_cap=attn_logits_soft_cap,
        )  # fmt: skip
    ones = jnp.ones_like(lengths)
    return _over_pages(
        q[:, None], k_pages, v_pages, lengths, page_indices, ones, attn_logits_soft_cap
    )[:, 0]


@operator(
    "multi_queries_paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor lengths, "
    "Tensor page_indices, Tensor effective_q_lens, int num_kv_pages_per_compute_block, "
    "int num_queries_per_compute_block, bool use_kernel, float? attn_logits_soft_cap=None) -> Tensor",
    _like_queries,
)
def lower_multi_queries(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    lengths: Array,
    page_indices: Array,
    effective_q_lens: Array,
    num_kv_pages_per_compute_block: int,
    num_queries_per_compute_block: int,
    use_kernel: bool,
    attn_logits_soft_cap: float | None = None,
) -> Array:
    """``multi_queries_paged_attention`` as a softmax over all pages."""
    return _over_pages(
        q, k_pages, v_pages, lengths, page_indices, effective_q_lens, attn_logits_soft_cap
    )


def _over_pages(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    lengths: Array,
    page_indices: Array,
    q_lengths: Array,
    cap: float | None,
) -> Array:
    """Attention of (batch, queries, heads, size) to the pages of each sequence."""
    batch, queries, heads, size = q.shape
    key_heads = k_pages.shape[0]
    keys, values = (
        # (key heads, batch, pages, page size, size) -> (key heads, batch, keys, size)
        pages[:, page_indices].reshape(key_heads, batch, -1, size)
        for pages in (k_pages, v_pages)
    )
    shared = q.reshape(batch, queries, key_heads, heads // key_heads, size)
    scores = jnp.einsum("bqhgd,hbkd->bhgqk", shared, keys, preferred_element_type=wide(q))
    place = jnp.arange(keys.shape[2])
    last = jnp.arange(queries) + (lengths - q_lengths)[:, None]
    last = jnp.minimum(last, (lengths - 1)[:, None])
    visible = (place <= last[:, :, None])[:, None, None]
    weights, sums, _ = weights_of(capped(scores, cap), visible)
    share = (weights / sums).astype(values.dtype)
    result = jnp.einsum("bhgqk,hbkd->bqhgd", share, values, preferred_element_type=wide(q))
    return result.reshape(q.shape)


@operator(
    "ragged_paged_attention(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, "
    "Tensor cu_q_lens, Tensor num_seqs, float sm_scale=1, int? sliding_window=None, "
    "float? soft_cap=None, float? mask_value=None, float? k_scale=None, float? v_scale=None, "
    "bool use_kernel=True, int? num_kv_pages_per_block=None, int? num_queries_per_block=None, "
    "int? vmem_limit_bytes=None) -> Tensor",
    _like_queries,
)
def lower_ragged(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> Array:
    """``ragged_paged_attention`` by jax's kernel, or one sequence after the other."""
    tpu = for_tpu(q.shape[-1] % LANES == 0, "ragged_paged_attention") if use_kernel else None
    if tpu is not None:
        by_default = max(1, min(page_indices.shape[1], _KEYS_PER_BLOCK // kv_pages.shape[1]))
        return call_kernel(
            tpu, pallas_kernels.ragged_paged_attention(),
            q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs,
            sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap,
            mask_value=mask_value, k_scale=k_scale, v_scale=v_scale,
            num_kv_pages_per_block=num_kv_pages_per_block or by_default,
            num_queries_per_block=num_queries_per_block or _QUERIES_PER_BLOCK,
            vmem_limit_bytes=vmem_limit_bytes or _VMEM_BYTES,
        )  # fmt: skip
    one = functools.partial(
        _one_sequence, q, kv_pages, kv_lens, page_indices, cu_q_lens,
        (sm_scale, sliding_window, soft_cap, mask_value, k_scale, v_scale),
    )  # fmt: skip
    count = jnp.minimum(num_seqs.reshape(()), page_indices.shape[0]).astype(jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, one, jnp.zeros_like(q))


def _one_sequence(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    numbers: tuple[Operand, ...],
    i: Array,
    so_far: Array,
) -> Array:
    """``so_far`` with the rows of sequence ``i`` filled in."""
    sm_scale, window, cap, mask_value, k_scale, v_scale = numbers
    tokens, _, size = q.shape
    pages = kv_pages[page_indices[i]].reshape(-1, kv_pages.shape[2] // 2, 2, size)
    keys, values = (
        _scaled(pages[:, :, part], scale, q.dtype) for part, scale in ((0, k_scale), (1, v_scale))
    )
    shared = q.reshape(tokens, keys.shape[1], -1, size)
    scores = jnp.einsum("qhgd,khd->hgqk", shared, keys, preferred_element_type=wide(q)) * sm_scale
    start, end = cu_q_lens[i], cu_q_lens[i + 1]
    row = jnp.arange(tokens)
    own_place = (row - end + kv_lens[i])[:, None]
    place = jnp.arange(keys.shape[0])
    hidden = place > own_place
    if window is not None:
        hidden |= place <= own_place - window
    scores = jnp.where(
        hidden, MASK_VALUE if mask_value is None else mask_value, capped(scores, cap)
    )
    weights, sums, _ = weights_of(scores, place < kv_lens[i])
    share = (weights / sums).astype(values.dtype)
    rows = jnp.einsum("hgqk,khd->qhgd", share, values, preferred_element_type=wide(q))
    mine = (row >= start) & (row < end)
    return jnp.where(mine[:, None, None], rows.reshape(q.shape).astype(q.dtype), so_far)


def _scaled(part: Array, scale: float | None, dtype: object) -> Array:
    return part if scale is None else (part.astype(jnp.float32) * scale).astype(dtype)
