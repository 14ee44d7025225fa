"""Reductions of consecutive segments of one dimension, given by their lengths or by where they begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from xla_core.lowering.rules.common import Scalar, is_nan, opmath, output_shape
from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.compaction import number
from xla_core.operators.lowering_registry import RuleContext, aten, inspected_rule, rule
from xla_core.torch_bridge.operands import Operand

_STARTS: Final = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def _segment_reduce_meta(
    data: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Scalar | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = lengths if lengths is not None else offsets
    if (
        given is None
        or indices is not None
        or axis < 0
        or given.dim() != axis + 1
        or given.shape[:axis] != data.shape[:axis]
        or reduce not in _STARTS
    ):
        raise RuntimeError("wrong operands of segment_reduce")  # the CPU says it in its own words
    count = given.shape[-1] - (lengths is None)
    result = data.new_empty((*data.shape[:axis], count, *data.shape[axis + 1 :]))
    return result, number(data)


class _Segments:
    """``data`` as ``[batch, length, rest]``, and for each position the segment it lies in.

    Positions in none have the number of segments.
    """

    def __init__(self, shape: tuple[int, ...], lengths: Array, offsets: Array, axis: int) -> None:
        self.shape = shape
        self.flat = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
        bounds = lengths if lengths is not None else offsets
        bounds = bounds.reshape(self.flat[0], bounds.shape[-1]).astype(np.int64)
        if lengths is not None:
            bounds = jnp.pad(jnp.cumsum(bounds, -1), ((0, 0), (1, 0)))
        self.count = bounds.shape[1] - 1
        self.lengths = bounds[:, 1:] - bounds[:, :-1]
        place = jnp.arange(shape[axis], dtype=np.int64)
        find = jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))
        inside = place[None] >= bounds[:, :1]
        self.of = select(inside, find(bounds[:, 1:]), self.count)
        self.row = jnp.arange(self.flat[0])[:, None]
        self.result = (*shape[:axis], self.count, *shape[axis + 1 :])

    def reduced(self, how: str, values: Array, start: float) -> Array:
        """One entry per segment, ``[batch, segments, rest]``, from ``start`` on."""
        whole = jnp.full((self.flat[0], self.count, self.flat[2]), start, values.dtype)
        place = whole.at[self.row, self.of]
        add: dict[str, Callable[..., Array]] = {
            "sum": place.add, "mean": place.add, "prod": place.multiply,
            "max": place.max, "min": place.min,
        }  # fmt: skip
        return add[how](values, mode="drop")

    def spread(self, entries: Array) -> Array:
        """What each position's segment has, zero where it is in none."""
        entries = entries.reshape(self.flat[0], self.count, self.flat[2])
        return entries.at[self.row, self.of].get(mode="fill", fill_value=0)


def _looks(data: torch.Tensor, reduce: str, **named: object) -> bool:
    lengths, offsets = named.get("lengths"), named.get("offsets")
    if _is_refused(data, lengths, offsets):
        return True
    return lengths is not None and not named.get("unsafe", False)


def _is_refused(data: Operand, lengths: Operand, offsets: Operand) -> bool:
    """Whether the CPU has no kernel for these dtypes, or nothing to reduce."""
    bounds = lengths if lengths is not None else offsets
    return (
        0 in data.shape
        or not str(data.dtype).removeprefix("torch.").startswith(("float", "bfloat"))
        or str(bounds.dtype).removeprefix("torch.") not in ("int32", "int64")
    )


@inspected_rule(aten.segment_reduce.default, meta=_segment_reduce_meta, looks=_looks, context=True)
def segment_reduce(
    context: RuleContext,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> tuple[Array, Array]:
    """One entry per segment; the number is -1 where the lengths do not add up to the dimension."""
    if _is_refused(data, lengths, offsets):
        return jnp.zeros(output_shape(context), data.dtype), jnp.asarray(-1, np.int64)
    segments = _Segments(data.shape, lengths, offsets, axis)
    values = opmath(data).reshape(segments.flat)
    start = _STARTS[reduce] if initial is None else initial
    result = segments.reduced(reduce, values, start)
    if reduce == "mean":
        length = segments.lengths[..., None]
        nothing = math.nan if initial is None else initial
        result = select(length > 0, result / jnp.maximum(length, 1).astype(result.dtype), nothing)
    right = jnp.ones((), np.bool_)
    if lengths is not None:
        right = jnp.all(lengths >= 0) & jnp.all(jnp.sum(lengths, -1) == data.shape[axis])
    return result.reshape(segments.result), select(right, np.int64(0), np.int64(-1))


def _segment_reduce_backward_meta(
    grad: torch.Tensor, output: torch.Tensor, data: torch.Tensor, reduce: str, **_: object
) -> torch.Tensor:
    return torch.empty_like(data)


@rule(aten._segment_reduce_backward.default, meta=_segment_reduce_backward_meta)
def segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Array:
    """The gradient of ``data``; equal extremes of a segment share theirs."""
    segments = _Segments(data.shape, lengths, offsets, axis)
    values = opmath(data).reshape(segments.flat)
    gradient = segments.spread(opmath(grad))
    if reduce in ("max", "min"):
        chosen = (values == segments.spread(opmath(output))) | is_nan(values)
        share = segments.reduced("sum", chosen.astype(values.dtype), 0.0)
        gradient = select(chosen, gradient / jnp.maximum(segments.spread(share), 1), 0)
    elif reduce == "mean":
        length = segments.lengths[..., None].astype(values.dtype)
        length = jnp.broadcast_to(length, (segments.flat[0], segments.count, segments.flat[2]))
        gradient = gradient / jnp.maximum(segments.spread(length), 1)
    elif reduce == "prod":
        gradient = gradient * _others(segments, values, 1.0 if initial is None else initial)
    return gradient.reshape(data.shape)


def _others(segments: _Segments, values: Array, start: float) -> Array:
    """For each position the product of all others of its segment, exact where some are zero."""
    zero, missing = values == 0, is_nan(values)
    usual = segments.reduced("prod", select(zero | missing, 1, values), start)
    zeros = segments.spread(segments.reduced("sum", zero.astype(values.dtype), 0.0))
    nans = segments.spread(segments.reduced("sum", missing.astype(values.dtype), 0.0))
    others_zero = zeros - zero.astype(values.dtype)
    others_missing = nans - missing.astype(values.dtype)
    product = segments.spread(usual) / select(zero | missing, 1, values)
    product = select(others_zero > 0, 0, product)
    return select(others_missing > 0, math.nan, product)
