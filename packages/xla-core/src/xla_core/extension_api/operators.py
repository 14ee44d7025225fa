"""Operators of an extension: their lowering rules, and the handlers that PyTorch's dispatcher calls."""

from __future__ import annotations

from torch._ops import OpOverload

from xla_core.dispatch.cpu_fallback import fallback_handler
from xla_core.operators.lowering_registry import rule
from xla_core.operators.product_flops import flops_of
from xla_core.operators.schema import signature
from xla_core.recording.xla_tensor import Handler, handler_of, set_handler
from xla_core.torch_bridge.operands import (
    AutogradContext,
    Gradients,
    NamedOperands,
    Operand,
    Operands,
    TorchObject,
    Tree,
)
from xla_core.torch_bridge.torch_private import when_dynamo_is_used
from xla_core.torch_features.optimization_barrier import behind_barrier

__all__ = [
    "AutogradContext",
    "Gradients",
    "Handler",
    "NamedOperands",
    "Operand",
    "Operands",
    "TorchObject",
    "Tree",
    "behind_barrier",
    "fallback_handler",
    "flops_of",
    "handler_of",
    "rule",
    "schema_of",
    "set_handler",
    "signature",
    "when_dynamo_is_used",
]


def schema_of(overload: OpOverload) -> TorchObject:
    """PyTorch's schema of an operator overload: ``name``, ``arguments``, ``returns``."""
    return overload._schema
