"""The multiplications and additions of products: torch's formulas, and those of operators recorded whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry


def flops_of(overload: OpOverload) -> Callable[..., int] | None:
    """The formula of an operator: takes its arguments and ``out_val``, its result; None if it has no product.

    Arguments and results may be tensors of any device, ``meta`` included, as only their shapes are read.
    Attention counts the positions that a causal mask hides, as PaLM's and MaxText's figures do.
    """
    packet = getattr(overload, "overloadpacket", None)  # higher-order operators have none
    whole = _WHOLE.get(getattr(packet, "_qualified_op_name", ""))
    return flop_registry.get(packet) if whole is None else whole


def _linear(input: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * math.prod(input.shape) * weight.shape[0]


def _linear_backward(
    input: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Sequence[bool],
    **_: object,
) -> int:
    return _linear(input, weight) * sum(output_mask[:2])


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    **__: object,
) -> int:
    return 2 * _attention(query, key, value)


_WHOLE: Final[Mapping[str, Callable[..., int]]] = {
    "aten::linear": _linear,
    "aten::linear_backward": _linear_backward,
    "xla::attention": _attention,
    "xla::attention_backward": _attention_backward,
    "xla::flash_attention_forward": _attention,
    "xla::splash_attention_forward": _attention,
}
"""The formulas that torch has not, by the names of operators."""
