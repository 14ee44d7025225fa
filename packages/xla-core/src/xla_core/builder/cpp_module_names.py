"""The builder's names of torch_xla's C++ module: operations, shapes and computations without wrapper classes.

A shape is a dictionary, ``{"type": "f32", "sizes": (2, 3)}``, or a tuple of such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from xla_core.builder import hlo_operations
from xla_core.builder.hlo import TORCH_TYPES, Described, XlaBuilder, XlaComputation, XlaOp, describe
from xla_core.builder.hlo_shapes import Shape
from xla_core.builder.xla_builder import (
    computation_from_module_proto as _xla_op_computation_from_module_proto,
)
from xla_core.builder.xla_builder import create_builder as _xla_op_create_builder
from xla_core.builder.xla_builder import create_placeholder_tensor, mkparam, tensor_shape
from xla_core.builder.xla_builder import get_computation_hlo as _xla_computation_text


def _xla_op_param(builder: XlaBuilder, param_no: int, shape: Described) -> XlaOp:
    """The parameter number ``param_no`` of the computation. Raises RuntimeError for dynamic dimensions."""
    return mkparam(builder, param_no, Shape(shape)).op


def _xla_op_create(
    builder: XlaBuilder, name: str, operands: Sequence[XlaOp], kwargs: Mapping[str, object]
) -> XlaOp:
    """The operation ``name`` (``"Add"``) on ``operands``, with the attributes ``kwargs``.

    Raises RuntimeError for an unknown name, and for operands that do not fit or belong to another builder.
    """
    return hlo_operations.create(builder, name, operands, dict(kwargs))


def _xla_op_build(name: str, root: XlaOp) -> XlaComputation:
    """The computation ``name`` that returns the value of ``root``."""
    return root.build(name)


def _xla_op_builder(op: XlaOp) -> XlaBuilder:
    """The builder that an operation belongs to."""
    return op.builder


def _xla_op_shape(op: XlaOp) -> Described:
    """The shape of an operation's value."""
    return describe(op.struct)


def _xla_op_tensor_shape(tensor: torch.Tensor, device: str = "") -> Described:
    """The shape of a tensor."""
    return tensor_shape(tensor, device).shape


def _xla_create_placeholder_tensor(shape: Described) -> torch.Tensor:
    """A tensor of this shape on the current device without a value, for recording computations."""
    return create_placeholder_tensor(shape["sizes"], TORCH_TYPES[shape["type"]])


__all__ = [
    "XlaBuilder", "XlaComputation", "XlaOp", "_xla_computation_text", "_xla_create_placeholder_tensor",
    "_xla_op_build", "_xla_op_builder", "_xla_op_computation_from_module_proto", "_xla_op_create",
    "_xla_op_create_builder", "_xla_op_param", "_xla_op_shape", "_xla_op_tensor_shape",
]  # fmt: skip
