"""Reads and writes items along the first dimension of an operation's value, for loops in HLO."""

from __future__ import annotations

from xla_core.builder.xla_builder import Op


def dynamic_slice(xs: Op, idx: Op) -> Op:
    """Item ``idx`` (a scalar) of ``xs`` along the first dimension, which the result lacks."""
    sizes = list(xs.shape().sizes)
    item = xs.dynamic_slice(_starts(idx, len(sizes)), [1, *sizes[1:]])
    return item.reshape(sizes[1:])


def dynamic_update_slice(ys: Op, y: Op, idx: Op) -> Op:
    """``ys`` with item ``idx`` (a scalar) along its first dimension replaced by ``y``."""
    sizes = list(ys.shape().sizes)
    return ys.dynamic_update_slice(y.reshape([1, *sizes[1:]]), _starts(idx, len(sizes)))


def _starts(index: Op, rank: int) -> list[Op]:
    return [index, *[index.zeros_like()] * (rank - 1)]
