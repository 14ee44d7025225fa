"""``flash_attention``: attention under the name that models written for TPUs call.

On a TPU jax's kernels compute it in blocks, so that memory grows with the lengths and not with their product
(Dao et al. 2022, https://arxiv.org/abs/2205.14135); on other devices all scores are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import jax.numpy as jnp
import torch
from jax import Array
from torch.autograd.function import FunctionCtx, once_differentiable

from xla_core.dynamo.dynamo_backend import kept_in_graphs
from xla_core.jax_bridge import pallas_kernels
from xla_core.kernels.kernel_operator import (
    LANES,
    MASK_VALUE,
    block_of,
    call_kernel,
    for_tpu,
    operator,
    padded,
    rounded_up,
    weights_of,
    wide,
)
from xla_core.kernels.per_shard_calls import over_parts, splits_positions
from xla_core.operators.target import Target
from xla_core.torch_bridge.op_library import XLA_LIB
from xla_core.torch_bridge.operands import Gradients, Operand

MSG_SEGMENTS: Final = "give both q_segment_ids and kv_segment_ids, or neither"
MSG_SEGMENT_SHAPE: Final = "{name} has the shape {got}; it needs (batch, length), here {wanted}"
MSG_SPEC: Final = (
    "flash_attention is split by batch and heads: partition_spec {spec} needs {rank} entries, the last "
    "two None"
)

_FORWARD: Final = (
    "flash_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? ab, Tensor? q_segment_ids, "
    "Tensor? kv_segment_ids, bool causal, float sm_scale, int[] blocks) -> (Tensor, Tensor)"
)
_BACKWARD: Final = (
    "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? ab, "
    "Tensor? q_segment_ids, Tensor? kv_segment_ids, Tensor o, Tensor logs, bool causal, "
    "float sm_scale, int[] blocks, bool with_ab) -> (Tensor, Tensor, Tensor, Tensor)"
)


class FlashAttention(torch.autograd.Function):
    """``flash_attention`` with positional arguments.

    ``DEFAULT_BLOCK_SIZES`` are the largest block lengths of the TPU's kernels.
    """

    MIN_BLOCK_SIZE: ClassVar[int] = LANES
    DEFAULT_MASK_VALUE: ClassVar[float] = MASK_VALUE
    DEFAULT_BLOCK_SIZES: ClassVar[dict[str, int]] = {
        "block_q": 512,
        "block_k_major": 512,
        "block_k": 512,
        "block_b": 2,
        "block_q_major_dkv": 512,
        "block_k_major_dkv": 512,
        "block_q_dkv": 512,
        "block_k_dkv": 512,
        "block_q_dq": 1024,
        "block_k_dq": 256,
        "block_k_major_dq": 512,
    }

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        q_segment_ids: torch.Tensor | None,
        kv_segment_ids: torch.Tensor | None,
        sm_scale: float,
        ab: torch.Tensor | None,
        partition_spec: Sequence[object] | None,
        mesh: object,
    ) -> torch.Tensor:
        """Compute ``flash_attention``."""
        numbers = (causal, float(sm_scale), list(FlashAttention.DEFAULT_BLOCK_SIZES.values()))
        operands = (q, k, v, ab, q_segment_ids, kv_segment_ids)
        ctx.numbers, ctx.spec, ctx.mesh = numbers, partition_spec, mesh

        def kernel(*tensors: Operand) -> Sequence[torch.Tensor]:
            return _by_batch(torch.ops.xla.flash_attention_forward, tensors, numbers)

        if partition_spec is None:
            o, logs = kernel(*operands)
        else:
            shapes = ((*q.shape[:-1], v.shape[-1]), tuple(q.shape[:-1]))
            results = zip((partition_spec, partition_spec[:-1]), shapes, strict=True)
            o, logs = over_parts(kernel, operands, _specs(partition_spec), list(results), mesh)
        ctx.save_for_backward(*operands, o, logs)
        return o

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradients of ``q``, ``k``, ``v`` and, if needed, ``ab``."""
        with_ab, spec = ctx.needs_input_grad[7], ctx.spec
        operands = (gradients[0], *ctx.saved_tensors)

        def kernel(*tensors: Operand) -> Sequence[torch.Tensor]:
            numbers = (*ctx.numbers, with_ab)
            gradients_of = _by_batch(torch.ops.xla.flash_attention_backward, tensors, numbers)
            return gradients_of if with_ab else gradients_of[:3]

        if spec is None:
            gradients_of = kernel(*operands)
        else:
            results = [(spec, tuple(t.shape)) for t in operands[1 : 5 if with_ab else 4]]
            specs = (spec, *_specs(spec), spec, spec[:-1])
            gradients_of = over_parts(kernel, operands, specs, results, ctx.mesh)
        dq, dk, dv, *dab = gradients_of
        return dq, dk, dv, None, None, None, None, dab[0] if dab else None, None, None


def _specs(spec: Sequence[object]) -> tuple[object, ...]:
    """The partition specs of ``q, k, v, ab`` and both segments, where ``spec`` is that of ``q``."""
    ids = (*spec[:-3], None)
    return (spec, spec, spec, spec, ids, ids)


@kept_in_graphs
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
    partition_spec: Sequence[object] | None = None,
    mesh: object = None,
) -> torch.Tensor:
    """``softmax(sm_scale * (q @ k.T + ab)) @ v``, differentiable once.

    ``q``, ``k`` and ``v`` are (batch, heads, length, head size), with any number of batch dimensions. ``sm_scale``
    defaults to 1. With ``causal`` (default: False) a position does not see later ones. Segment ids are integers
    (batch, length); a position sees only positions of its own segment. ``ab`` (default: None) broadcasts to (batch,
    heads, q length, kv length). Over a mesh of devices (SPMD), ``partition_spec`` says how these tensors are split
    by batch and heads, so that each device computes its own part; ``mesh`` defaults to the global one. Raises
    ValueError if only one kind of segment ids is given, or one of another shape, and for a spec that splits lengths
    or sizes.
    """
    _check_segments(q, k, q_segment_ids, kv_segment_ids)
    if partition_spec is not None and (
        len(partition_spec) != q.dim() or splits_positions(partition_spec)
    ):
        raise ValueError(MSG_SPEC.format(spec=tuple(partition_spec), rank=q.dim()))
    bias = None if ab is None else ab.expand(*q.shape[:-1], k.shape[-2])
    result: torch.Tensor = FlashAttention.apply(
        q, k, v, causal, q_segment_ids, kv_segment_ids, sm_scale, bias, partition_spec, mesh
    )
    return result


def _by_batch(
    operator: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[Operand],
) -> Sequence[torch.Tensor]:
    """The results of an operator that takes one batch dimension, for tensors with any number of them."""
    first = tensors[0]
    assert first is not None
    batch = first.shape[:-3]
    if len(batch) == 1:
        return operator(*tensors, *numbers)  # type: ignore[no-any-return]
    count = len(batch)
    flat = [None if t is None else t.reshape(-1, *t.shape[count:]) for t in tensors]
    return [r.reshape(*batch, *r.shape[1:]) if r.dim() else r for r in operator(*flat, *numbers)]


def _check_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
) -> None:
    if (q_segments is None) != (kv_segments is None):
        raise ValueError(MSG_SEGMENTS)
    if q_segments is None or kv_segments is None:
        return
    for name, ids, of in (("q_segment_ids", q_segments, q), ("kv_segment_ids", kv_segments, k)):
        wanted = (*of.shape[:-3], of.shape[-2])
        if tuple(ids.shape) != wanted:
            text = MSG_SEGMENT_SHAPE.format(name=name, got=tuple(ids.shape), wanted=wanted)
            raise ValueError(text)


def _by_name(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, casual: bool = False
) -> torch.Tensor:
    return flash_attention(q, k, v, causal=casual)


# "casual" is the spelling in torch_xla's schema, which graphs of other libraries use
XLA_LIB.define("flash_attention(Tensor q, Tensor k, Tensor v, bool casual=False) -> Tensor")
XLA_LIB.impl("flash_attention", _by_name, "CompositeImplicitAutograd")


# -- lowering --------------------------------------------------------------------------------------


def _forward_meta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: object
) -> tuple[torch.Tensor, ...]:
    logs = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), logs


def _backward_meta(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ab: torch.Tensor | None,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    with_ab = ab is not None and rest[-1]
    last = torch.empty_like(ab) if with_ab and ab is not None else q.new_empty(())
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), last


def _kernel_for(q: Array, k: Array, v: Array) -> Target | None:
    fits = q.ndim == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1]
    fits = fits and q.dtype == k.dtype == v.dtype and q.dtype in (jnp.float32, jnp.bfloat16)
    return for_tpu(fits, "flash_attention")


@operator(_FORWARD, _forward_meta)
def forward(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None,
    q_ids: Array | None,
    kv_ids: Array | None,
    causal: bool,
    sm_scale: float,
    blocks: Sequence[int],
) -> tuple[Array, Array]:
    """The attention, and the logarithm of the sum of each row's unnormalized weights."""
    tpu = _kernel_for(q, k, v)
    if tpu is not None:
        return _Kernels(tpu, q, k, ab, q_ids, kv_ids, causal, sm_scale, blocks).forward(v)
    scores, visible = _scores(q, k, ab, q_ids, kv_ids, causal, sm_scale)
    weights, sums, highest = weights_of(scores, visible)
    share = (weights / sums).astype(v.dtype)
    o = jnp.einsum("...qk,...kd->...qd", share, v, preferred_element_type=wide(q))
    return o.astype(q.dtype), _logs(sums[..., 0], highest[..., 0])


def _logs(sums: Array, highest: Array) -> Array:
    """The logarithm of the sum of weights; 0 for rows that see nothing, so that their gradients are 0."""
    return jnp.where(highest > MASK_VALUE / 2, highest + jnp.log(sums), 0)


@operator(_BACKWARD, _backward_meta)
def backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None,
    q_ids: Array | None,
    kv_ids: Array | None,
    o: Array,
    logs: Array,
    causal: bool,
    sm_scale: float,
    blocks: Sequence[int],
    with_ab: bool,
) -> tuple[Array, Array, Array, Array]:
    """The gradients of ``q``, ``k``, ``v`` and ``ab``; for ``ab`` a single zero if it is not needed."""
    inner = jnp.sum(o.astype(logs.dtype) * grad.astype(logs.dtype), axis=-1)
    tpu = _kernel_for(q, k, v)
    if tpu is not None:
        kernels = _Kernels(tpu, q, k, ab, q_ids, kv_ids, causal, sm_scale, blocks)
        dq, dk, dv, ds = kernels.backward(v, grad, logs, inner)
    else:
        scores, visible = _scores(q, k, ab, q_ids, kv_ids, causal, sm_scale)
        if visible is not None:
            scores = jnp.where(visible, scores, MASK_VALUE)
        share = jnp.exp(scores - logs[..., None])
        by_share = jnp.einsum("...qd,...kd->...qk", grad, v, preferred_element_type=logs.dtype)
        ds = share * (by_share - inner[..., None]) * sm_scale
        dq = jnp.einsum("...qk,...kd->...qd", ds.astype(k.dtype), k)
        dk = jnp.einsum("...qk,...qd->...kd", ds.astype(q.dtype), q)
        dv = jnp.einsum("...qk,...qd->...kd", share.astype(grad.dtype), grad)
    return dq, dk, dv, ds if with_ab and ds is not None else jnp.zeros((), q.dtype)


def _scores(
    q: Array,
    k: Array,
    ab: Array | None,
    q_ids: Array | None,
    kv_ids: Array | None,
    causal: bool,
    sm_scale: float,
) -> tuple[Array, Array | None]:
    """The scores (batch, heads, q length, kv length), and a mask of the visible ones, None if all are visible."""
    scores = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=wide(q))
    if ab is not None:
        scores = scores + ab
    scores = scores * sm_scale
    visible: Array | None = None
    if q_ids is not None and kv_ids is not None:
        visible = (q_ids[..., :, None] == kv_ids[..., None, :])[..., None, :, :]
    if causal:
        earlier = jnp.tri(q.shape[-2], k.shape[-2], dtype=bool)
        visible = earlier if visible is None else visible & earlier
    return scores, visible


class _Kernels:
    """jax's kernels for one call: operands are padded to whole blocks, and results are cut again."""

    def __init__(
        self,
        tpu: Target,
        q: Array,
        k: Array,
        ab: Array | None,
        q_ids: Array | None,
        kv_ids: Array | None,
        causal: bool,
        sm_scale: float,
        blocks: Sequence[int],
    ) -> None:
        self.tpu, self.causal, self.sm_scale = tpu, causal, sm_scale
        self.kernels = pallas_kernels.flash_attention()
        self.q_length, self.kv_length = q.shape[2], k.shape[2]
        self.q_padded = rounded_up(self.q_length, LANES)
        self.kv_padded = rounded_up(self.kv_length, LANES)
        self.q, self.k = self._rows(q), self._columns(k)
        self.ab = None if ab is None else padded(self._rows(ab), 3, self.kv_padded)
        names = FlashAttention.DEFAULT_BLOCK_SIZES
        self.blocks = dict(zip(names, blocks, strict=True))
        self.segments = self._segments(q_ids, kv_ids, q.shape[0])

    def _rows(self, array: Array) -> Array:
        return padded(array, 2, self.q_padded)

    def _columns(self, array: Array) -> Array:
        return padded(array, 2, self.kv_padded)

    def _segments(self, q_ids: Array | None, kv_ids: Array | None, batch: int) -> Array:
        """The segment ids for the kernels, in which padding belongs to segments of its own."""
        whole = (self.q_length, self.kv_length) == (self.q_padded, self.kv_padded)
        if q_ids is None or kv_ids is None:
            if whole:
                return None
            q_ids = jnp.zeros((batch, self.q_length), jnp.int32)
            kv_ids = jnp.zeros((batch, self.kv_length), jnp.int32)
        q_ids, kv_ids = q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32)
        least = jnp.iinfo(jnp.int32).min
        return self.kernels.SegmentIds(
            padded(q_ids, 1, self.q_padded, least), padded(kv_ids, 1, self.kv_padded, least + 1)
        )

    def _block(self, name: str, length: int) -> int:
        return block_of(self.blocks[name], length)

    def forward(self, v: Array) -> tuple[Array, Array]:
        """The attention, and the logarithms of the sums of the rows' weights."""
        o, sums, highest = call_kernel(
            self.tpu, self.kernels._flash_attention_impl,
            self.q, self.k, self._columns(v), self.ab, self.segments,
            save_residuals=True, causal=self.causal, sm_scale=self.sm_scale,
            block_b=min(self.blocks["block_b"], self.q.shape[0]),
            block_q=self._block("block_q", self.q_padded),
            block_k_major=self._block("block_k_major", self.kv_padded),
            block_k=self._block("block_k", self._block("block_k_major", self.kv_padded)),
            debug=False,
        )  # fmt: skip
        cut = slice(self.q_length)
        return o[:, :, cut], _logs(sums, highest)[:, :, cut]

    def backward(
        self, v: Array, grad: Array, logs: Array, inner: Array
    ) -> tuple[Array, Array, Array, Array | None]:
        """The gradients of ``q``, ``k``, ``v`` and ``ab`` (None without ``ab``)."""
        # The kernels take sums and maxima of weights; 1 and the logarithm of the sum give the same weights.
        residuals = (jnp.ones((*self.q.shape[:-1],), logs.dtype), self._rows(logs))
        operands = (
            self.q, self.k, self._columns(v), self.ab, self.segments,
            *residuals, self._rows(grad), self._rows(inner),
        )  # fmt: skip
        numbers = {
            "sm_scale": self.sm_scale, "causal": self.causal, "mask_value": MASK_VALUE, "debug": False,
        }  # fmt: skip
        q_major = self._block("block_q_major_dkv", self.q_padded)
        k_major = self._block("block_k_major_dkv", self.kv_padded)
        dk, dv = call_kernel(
            self.tpu, self.kernels._flash_attention_bwd_dkv, *operands, **numbers,
            block_q_major=q_major, block_q=self._block("block_q_dkv", q_major),
            block_k_major=k_major, block_k=self._block("block_k_dkv", k_major),
        )  # fmt: skip
        k_major = self._block("block_k_major_dq", self.kv_padded)
        dq, ds = call_kernel(
            self.tpu, self.kernels._flash_attention_bwd_dq, *operands, **numbers,
            block_q_major=self._block("block_q_dq", self.q_padded),
            block_k_major=k_major, block_k=self._block("block_k_dq", k_major),
        )  # fmt: skip
        rows, columns = slice(self.q_length), slice(self.kv_length)
        ds = None if ds is None else ds[:, :, rows, columns]
        return dq[:, :, rows], dk[:, :, columns], dv[:, :, columns], ds
