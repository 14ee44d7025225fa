"""Defines operators of the namespace ``xla``, with helpers for their lowering rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import jax
import jax.numpy as jnp
import torch
from jax import Array

from xla_core.jax_bridge import pallas_kernels
from xla_core.operators import target
from xla_core.operators.lowering_registry import rule
from xla_core.support import counters
from xla_core.torch_bridge.op_library import XLA_LIB
from xla_core.torch_bridge.operands import Operand

F = TypeVar("F", bound=Callable[..., object])
Kernel = Callable[..., Array]

MASK_VALUE: Final[float] = -0.7 * torch.finfo(torch.float32).max
"""The value of masked scores; far from overflow, as in jax's kernels."""


def operator(schema: str, meta: Callable[..., object]) -> Callable[[F], F]:
    """Define the operator ``xla::`` + ``schema``; the decorated function is its lowering rule.

    ``meta`` takes the operator's arguments with meta tensors, and returns meta tensors like the results.
    """

    def register(function: F) -> F:
        XLA_LIB.define(schema)
        name = schema.partition("(")[0]
        XLA_LIB.impl(name, meta, "Meta")
        rule(getattr(torch.ops.xla, name).default)(function)
        return function

    return register


def for_tpu(fits: bool, name: str) -> target.Target | None:
    """The TPU that the program is lowered for, if it is a TPU and its kernel ``fits``; else None.

    A kernel that does not fit is counted under ``PlainKernel::name``, since plain operations need more memory.
    """
    current = target.current()
    if current is None or current.platform != "tpu":
        return None
    if not fits:
        counters.increment(f"PlainKernel::{name}")
        return None
    return current


def call_kernel(tpu: target.Target, kernel: Kernel, *operands: Array, **options: object) -> Array:
    """``kernel(*operands, **options)`` traced for ``tpu``, with int64 operands as int32."""
    narrow, named = jax.tree.map(_narrow, (operands, options))
    return pallas_kernels.call(
        kernel, pallas_kernels.for_tpu(tpu.kind, tpu.cores), *narrow, **named
    )


def _narrow(operand: Array) -> Array:
    if isinstance(operand, Array) and operand.dtype == jnp.int64:
        return operand.astype(jnp.int32)
    return operand


def wide(*arrays: Array) -> Array:
    """The dtype in which sums of products of these arrays are computed, at least float32."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def weights_of(scores: Array, visible: Array | None) -> tuple[Array, Array, Array]:
    """The parts of a softmax over the last dimension: unnormalized weights, their sums, and the maxima.

    ``visible`` is a mask of the scores that count (None: all). A row in which nothing is visible has equal weights.
    """
    if visible is not None:
        scores = jnp.where(visible, scores, MASK_VALUE)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    return weights, weights.sum(axis=-1, keepdims=True), highest


def capped(scores: Array, cap: float | None) -> Array:
    """``cap * tanh(scores / cap)``, or the scores if ``cap`` is None."""
    return scores if cap is None else jnp.tanh(scores / cap) * cap


LANES: Final = 128
"""The lanes of a TPU's registers; blocks of kernels are multiples of it."""


def block_of(wanted: int, length: int) -> int:
    """The longest multiple of ``LANES``, at most ``wanted``, that divides ``length``, also a multiple."""
    block = max(LANES, min(wanted, length) // LANES * LANES)
    while length % block:
        block -= LANES
    return block


def rounded_up(length: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``length``."""
    return -(-length // multiple) * multiple


def padded(array: Array, axis: int, length: int, value: Operand = 0) -> Array:
    """``array`` with ``value`` appended along ``axis`` up to ``length``."""
    missing = length - array.shape[axis]
    if not missing:
        return array
    widths: Sequence[tuple[int, int]] = [
        (0, missing if i == axis % array.ndim else 0) for i in range(array.ndim)
    ]
    return jnp.pad(array, widths, constant_values=value)
