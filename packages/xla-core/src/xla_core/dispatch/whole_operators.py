"""Operators that are recorded as one, though PyTorch defines them by others: fewer entries and autograd nodes.

A linear layer was four operators and ten in the backward pass, each through all of PyTorch's layers. Their
lowering rules compute what the others would. Where that is seen from outside, the others are recorded as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_core.recording.xla_tensor import XLATensor
from xla_core.support.once import Once
from xla_core.torch_bridge.whole_operators import is_watched, parts_of, register, whole

aten = torch.ops.aten


def _linear() -> Callable[..., Any]:
    as_one, by_parts = whole(aten.linear.default), parts_of(aten.linear.default)

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        """``linear`` as one operator where its gradients have the ranks that layers have."""
        if (
            type(input) is XLATensor
            and type(weight) is XLATensor
            and (bias is None or (type(bias) is XLATensor and bias.dim() == 1))
            and weight.dim() == 2
            and input.dim() > 1
            and not is_watched()
        ):
            return as_one(input, weight, bias)
        return by_parts(input, weight, bias)

    return linear


_installed = Once()


def install() -> None:
    """Register the operators with PyTorch; once."""
    if _installed.begin():
        register(aten.linear.default, _linear())
