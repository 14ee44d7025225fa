"""Layouts that ``xla`` tensors do not have: sparse, nested and MKL-DNN ones are refused in one way.

Otherwise an operator that makes or takes such tensors would run on the CPU first, and say afterwards that
its result cannot be a dense tensor; or C++ would say that a dispatch key has no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

import torch
from torch._ops import OpOverload

from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

MSG_LAYOUT: Final = (
    "{operator}: tensors on an xla device are dense (torch.strided), none is sparse, nested or of MKL-DNN. "
    "Compute with dense ones (.to_dense() of a sparse tensor, .to_padded_tensor(0) of a nested one, "
    "sparse=False of an embedding), or move what the operator takes to the CPU by .cpu(). A nested tensor "
    "with layout=torch.jagged can be made on the CPU and moved by .to('xla')"
)

# What is in the names of operators that make or take such tensors, and names that do not say it.
_WORDS: Final = ("sparse", "nested", "mkldnn")
_NAMES: Final = frozenset({"aten::_spdiags", "aten::_coalesce", "aten::hspmm", "aten::sspaddmm"})


class LayoutError(NotImplementedError, TypeError):
    """A sparse, nested or MKL-DNN tensor was asked for on an ``xla`` device."""


def is_about_layouts(overload: OpOverload) -> bool:
    """Whether an operator that has no lowering makes or takes tensors of another layout."""
    name = str(overload._schema.name)
    return name in _NAMES or any(word in name for word in _WORDS)


def refuse(overload: OpOverload) -> NoReturn:
    """Raise LayoutError."""
    name = str(overload._schema.name)
    raise LayoutError(MSG_LAYOUT.format(operator=name))


def refusing_handler(overload: OpOverload) -> Handler:
    """A handler that raises LayoutError where the operator is called."""

    def refused(_args: Operands, _kwargs: NamedOperands | None) -> NoReturn:
        refuse(overload)

    return refused


def sparse_addmm(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``sparse.mm`` and ``sparse.addmm``: of dense tensors an ordinary product, as on the CPU."""
    if not all(isinstance(a, XLATensor) for a in args[:3]):
        refuse(torch.ops.aten._sparse_addmm.default)
    return handler_of(torch.ops.aten.addmm.default)(args, kwargs)


def check_wanted(overload: OpOverload, kwargs: Mapping[str, Operand]) -> None:
    """Raise LayoutError where the caller asks for another layout, as ``zeros_like(x, layout=...)`` may."""
    if kwargs.get("layout") not in (None, torch.strided):
        refuse(overload)
