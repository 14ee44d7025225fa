"""``splash_attention``: attention whose TPU kernel, a part of jax, skips blocks in which all scores are masked."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch.autograd.function import FunctionCtx, once_differentiable

from xla_core.contract.foreign_values import JsonValue
from xla_core.dynamo.dynamo_backend import kept_in_graphs
from xla_core.jax_bridge import pallas_kernels
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.kernels.kernel_operator import (
    LANES,
    block_of,
    call_kernel,
    capped,
    for_tpu,
    operator,
    padded,
    rounded_up,
    weights_of,
    wide,
)
from xla_core.kernels.per_shard_calls import over_parts, splits_positions
from xla_core.torch_bridge.operands import Gradients, Operand

MSG_NO_WINDOW: Final = (
    "SplashAttentionConfig(attentiontype_local_sliding=True) needs slide_window_size, got None"
)
MSG_SHAPES: Final = (
    "splash_attention needs as many key and value heads as query heads, and one length: (batch, heads, "
    "length, size); got q {q}, k {k}, v {v}"
)
MSG_SEGMENTS: Final = (
    "decoder_segment_ids has the shape {got}; it needs (batch, length), here {wanted}"
)
MSG_SPEC: Final = (
    "splash_attention is split by batch and heads: the last two of qkv_partition_spec {spec} have to be "
    "None"
)


@dataclasses.dataclass(eq=True, frozen=True)
class SplashAttentionConfig:
    """Options of ``splash_attention``: the TPU kernel's block lengths and layouts, the mask, and the sharding.

    With ``attentiontype_local_sliding`` a position sees those that are at most ``slide_window_size`` positions
    away. With ``mesh`` (the ``str`` of a mesh) each device computes its own batches and heads, as the partition
    specs say.
    """

    sa_block_q: int = 2048
    sa_block_kv: int = 2048
    sa_block_kv_compute: int = 2048
    sa_block_q_dkv: int = 2048
    sa_block_kv_dkv: int = 2048
    sa_block_kv_dkv_compute: int = 2048
    sa_block_q_dq: int = 2048
    sa_block_kv_dq: int = 2048
    sa_use_fused_bwd_kernel: bool = True
    sa_q_layout: str = "HEAD_DIM_MINOR"
    sa_k_layout: str = "HEAD_DIM_MINOR"
    sa_v_layout: str = "HEAD_DIM_MINOR"
    mesh: str | None = None
    qkv_partition_spec: tuple[object, ...] = (("data", "fsdp"), None, None, None)
    segment_ids_partition_spec: tuple[object, ...] = (("data", "fsdp"), None)
    attentiontype_local_sliding: bool = False
    slide_window_size: int | None = None

    def to_json(self) -> str:
        """The configuration as JSON, which ``splash_attention`` also takes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: str) -> SplashAttentionConfig:
        """The configuration that ``to_json`` wrote."""
        fields = json.loads(data)
        return cls(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: JsonValue) -> JsonValue:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class SplashAttention(torch.autograd.Function):
    """``splash_attention`` with positional arguments."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        config: str,
        decoder_segment_ids: torch.Tensor | None,
        causal: bool,
        attn_logits_soft_cap: float | None,
    ) -> torch.Tensor:
        """The attention."""
        ctx.save_for_backward(q, k, v, decoder_segment_ids)
        ctx.rest = rest = (config, causal, attn_logits_soft_cap)

        def kernel(*tensors: Operand) -> Sequence[torch.Tensor]:
            return [torch.ops.xla.splash_attention_forward(*tensors, *rest)]

        shapes = [(*q.shape[:-1], v.shape[-1])]
        return _by_parts(kernel, (q, k, v, decoder_segment_ids), shapes, config)[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradients of ``q``, ``k`` and ``v``."""
        q, k, v, ids = ctx.saved_tensors

        def kernel(
            q: Operand, k: Operand, v: Operand, ids: Operand, grad: Operand
        ) -> Sequence[torch.Tensor]:
            derivatives = torch.ops.xla.splash_attention_backward(grad, q, k, v, ids, *ctx.rest)
            return derivatives  # type: ignore[no-any-return]

        shapes = [tuple(t.shape) for t in (q, k, v)]
        derivatives = _by_parts(kernel, (q, k, v, ids, gradients[0]), shapes, ctx.rest[0])
        return *derivatives, None, None, None, None


def _by_parts(
    kernel: Callable[..., Sequence[torch.Tensor]],
    operands: Sequence[torch.Tensor | None],
    shapes: Sequence[tuple[int, ...]],
    config: str,
) -> Sequence[torch.Tensor]:
    """``kernel(q, k, v, ids, ...)``, on each device's batches and heads if ``config`` has a mesh."""
    options = SplashAttentionConfig.from_json(config)
    if options.mesh is None:
        return kernel(*operands)
    spec = options.qkv_partition_spec
    more = [spec] * (len(operands) - 4)
    specs = (spec, spec, spec, options.segment_ids_partition_spec, *more)
    return over_parts(kernel, operands, specs, [(spec, shape) for shape in shapes], options.mesh)


@kept_in_graphs
def splash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: str | SplashAttentionConfig,
    decoder_segment_ids: torch.Tensor | None = None,
    causal: bool = True,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """``softmax(q @ k.T) @ v``, without scaling; differentiable once.

    ``q``, ``k`` and ``v`` are (batch, heads, length, size), with as many heads of each. ``config`` is a
    ``SplashAttentionConfig`` or its ``to_json()``. With ``causal`` (default: True) a position does not see later
    ones; with ``decoder_segment_ids``, integers (batch, length), it sees its own segment only. With
    ``attn_logits_soft_cap`` (default: None) scores become ``cap * tanh(score / cap)``. Raises ValueError for shapes
    that do not fit, a sliding window without a size, and a partition spec that splits lengths or sizes.
    """
    options = SplashAttentionConfig.from_json(config) if isinstance(config, str) else config
    if options.attentiontype_local_sliding and options.slide_window_size is None:
        raise ValueError(MSG_NO_WINDOW)
    if q.shape[:3] != k.shape[:3] or k.shape[:3] != v.shape[:3] or q.dim() != 4:
        shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)}
        raise ValueError(MSG_SHAPES.format(**shapes))
    wanted = (q.shape[0], q.shape[2])
    if decoder_segment_ids is not None and tuple(decoder_segment_ids.shape) != wanted:
        got = tuple(decoder_segment_ids.shape)
        raise ValueError(MSG_SEGMENTS.format(got=got, wanted=wanted))
    if options.mesh is not None and splits_positions(options.qkv_partition_spec):
        raise ValueError(MSG_SPEC.format(spec=options.qkv_partition_spec))
    result: torch.Tensor = SplashAttention.apply(
        q, k, v, options.to_json(), decoder_segment_ids, causal, attn_logits_soft_cap
    )
    return result


# -- lowering --------------------------------------------------------------------------------------


def _forward_meta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: object
) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _backward_meta(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: object
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@operator(
    "splash_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? segment_ids, str config, "
    "bool causal, float? soft_cap) -> Tensor",
    _forward_meta,
)
def forward(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    config: str,
    causal: bool,
    soft_cap: float | None,
) -> Array:
    """The attention."""
    run, attention = _attention(q, k, v, config, causal, soft_cap)
    return run(attention, q, k, v, segment_ids)


@operator(
    "splash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? segment_ids, "
    "str config, bool causal, float? soft_cap) -> (Tensor, Tensor, Tensor)",
    _backward_meta,
)
def backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    config: str,
    causal: bool,
    soft_cap: float | None,
) -> Gradients:
    """The gradients of ``q``, ``k`` and ``v``, by jax's automatic differentiation or by its kernel."""
    run, attention = _attention(q, k, v, config, causal, soft_cap)

    def gradients(q: Array, k: Array, v: Array, ids: Array | None, grad: Array) -> Array:
        return jax.vjp(lambda *operands: attention(*operands, ids), q, k, v)[1](grad)

    return run(gradients, q, k, v, segment_ids, grad)


def _attention(
    q: Array,
    k: Array,
    v: Array,
    config: str,
    causal: bool,
    soft_cap: float | None,
) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """A function that calls functions of arrays, and the attention as a function of ``q, k, v`` and segment ids."""
    options = SplashAttentionConfig.from_json(config)
    window = options.slide_window_size if options.attentiontype_local_sliding else None
    fits = q.dtype == k.dtype == v.dtype and q.dtype in (jnp.float32, jnp.bfloat16)
    tpu = for_tpu(fits, "splash_attention")
    if tpu is None:
        return _call, functools.partial(_plain, causal, window, soft_cap)
    kernel = functools.partial(_kernel, options, causal, window, soft_cap)
    return functools.partial(call_kernel, tpu), kernel


def _call(function: Callable[..., object], *operands: Array | None) -> Array:
    return function(*operands)


def _plain(
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
) -> Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=wide(q))
    row, column = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None]
    visible = jnp.ones((q.shape[2], k.shape[2]), bool)
    if causal:
        visible &= column <= row
    if window is not None:
        visible &= jnp.abs(row - column) <= window
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        visible = visible & same[:, None]
    weights, sums, _ = weights_of(capped(scores, soft_cap), visible)
    share = (weights / sums).astype(v.dtype)
    result = jnp.einsum("bhqk,bhkd->bhqd", share, v, preferred_element_type=wide(q))
    return result.astype(q.dtype)


def _kernel(
    options: SplashAttentionConfig,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
) -> Array:
    """Jax's kernel on operands that are padded to whole blocks; the padding is a segment of its own."""
    kernels, masks = pallas_kernels.splash_attention()
    length = q.shape[2]
    whole = rounded_up(length, LANES)
    if segment_ids is None and whole > length:
        segment_ids = jnp.zeros((q.shape[0], length), jnp.int32)
    segments = None
    if segment_ids is not None:
        ids = padded(segment_ids.astype(jnp.int32), 1, whole, jnp.iinfo(jnp.int32).min)
        segments = kernels.SegmentIds(ids, ids)

    mask = (masks.CausalMask if causal else masks.FullMask)((whole, whole))
    if window is not None:
        mask &= masks.LocalMask((whole, whole), (window, window), 0)
    splash = kernels.make_splash_mha(
        masks.MultiHeadMask((mask,) * q.shape[1]),
        head_shards=1, q_seq_shards=1,
        block_sizes=_block_sizes(kernels, options, whole),
        attn_logits_soft_cap=soft_cap,
    )  # fmt: skip
    operands = [padded(operand, 2, whole) for operand in (q, k, v)]
    return jax.vmap(splash)(*operands, segments)[:, :, :length]


def _block_sizes(kernels: ModuleType, options: SplashAttentionConfig, length: int) -> JaxObject:
    fused = options.sa_use_fused_bwd_kernel
    layouts = kernels.QKVLayout
    kv, kv_dkv = block_of(options.sa_block_kv, length), block_of(options.sa_block_kv_dkv, length)
    return kernels.BlockSizes(
        block_q=block_of(options.sa_block_q, length),
        block_kv=kv,
        block_kv_compute=block_of(options.sa_block_kv_compute, kv),
        block_q_dkv=block_of(options.sa_block_q_dkv, length),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=block_of(options.sa_block_kv_dkv_compute, kv_dkv),
        block_q_dq=None if fused else block_of(options.sa_block_q_dq, length),
        block_kv_dq=None if fused else block_of(options.sa_block_kv_dq, length),
        use_fused_bwd_kernel=fused,
        q_layout=layouts[options.sa_q_layout],
        k_layout=layouts[options.sa_k_layout],
        v_layout=layouts[options.sa_v_layout],
    )
