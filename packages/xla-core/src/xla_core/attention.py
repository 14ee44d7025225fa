"""``flash_attention``: the attention that models written for TPUs call, by any device's own operators."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional as F

MSG_SEGMENTS: Final = "q_segment_ids and kv_segment_ids are given both or not at all"
MSG_SEGMENT_SHAPE: Final = "{name} has the shape {got}; it needs (batch, length), here {wanted}"


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """``softmax(sm_scale * q @ k.T + ab) @ v`` over (batch, heads, length, head size), differentiable.

    ``causal`` hides later positions; positions see only those of their own segment (integers (batch,
    length)); ``ab`` is added to the scores and broadcasts to (batch, heads, q length, kv length). The
    scores are computed in full, so memory grows with q length times kv length: no kernel of its own
    is behind it. ``partition_spec`` and ``mesh`` are accepted: XLA partitions the products by itself.
    Raises ValueError for one kind of segments without the other, or of another shape.
    """
    del partition_spec, mesh
    bias = ab
    hidden = _hidden(q, k, causal, q_segment_ids, kv_segment_ids)
    if hidden is not None:
        base = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias.to(q.dtype)
        bias = torch.where(hidden, torch.finfo(q.dtype).min, base)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=sm_scale)


def _hidden(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
) -> torch.Tensor | None:
    """Where scores do not count, bool (batch or 1, 1, q length, kv length); None if all do."""
    if (q_segments is None) != (kv_segments is None):
        raise ValueError(MSG_SEGMENTS)
    hidden: torch.Tensor | None = None
    if causal:
        rows = torch.arange(q.shape[-2], device=q.device)[:, None]
        hidden = (torch.arange(k.shape[-2], device=q.device) > rows)[None, None]
    if q_segments is None or kv_segments is None:
        return hidden
    for name, ids, of in (("q_segment_ids", q_segments, q), ("kv_segment_ids", kv_segments, k)):
        wanted = (of.shape[0], of.shape[-2])
        if tuple(ids.shape) != wanted:
            text = MSG_SEGMENT_SHAPE.format(name=name, got=tuple(ids.shape), wanted=wanted)
            raise ValueError(text)
    other = q_segments[:, None, :, None] != kv_segments[:, None, None, :]
    return other if hidden is None else hidden | other
