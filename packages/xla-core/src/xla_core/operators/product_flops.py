"""The multiplications and additions of products: torch's formulas, and those of operators recorded whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

_aten: Final = torch.ops.aten


def flops_of(overload: OpOverload) -> Callable[..., int] | None:
    """The formula of an operator: takes its arguments and ``out_val``, its result; None if it has no product.

    Arguments and results may be tensors of any device, ``meta`` included, as only their shapes are read.
    """
    packet = getattr(overload, "overloadpacket", None)
    whole = _WHOLE.get(packet)
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


_WHOLE: Final[Mapping[object, Callable[..., int]]] = {
    _aten.linear: _linear,
    _aten.linear_backward: _linear_backward,
}
