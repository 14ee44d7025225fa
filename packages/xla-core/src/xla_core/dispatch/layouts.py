"""Layouts other than the dense one: ``SparseXLATensor`` is COO; compressed, nested and MKL-DNN ones are refused.

A sparse tensor is one of PyTorch's C++, whose device is ``xla`` and whose indices and values are ``xla``
tensors; the class only says what an operator does below autograd. An operator that makes or takes another
layout would run on the CPU first, and say afterwards that its result cannot be a dense tensor; or C++ would
say that a dispatch key has no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NoReturn

import torch
from torch._ops import OpOverload

from xla_core.recording.xla_tensor import Handler, XLATensor
from xla_core.torch_bridge import reference_kernels, torch_private
from xla_core.torch_bridge.operands import Operand

MSG_LAYOUT: Final = (
    "{operator}: tensors on an xla device are dense (torch.strided) or sparse by coordinates "
    "(torch.sparse_coo), none is of a compressed sparse layout, nested or of MKL-DNN. Compute with dense ones "
    "(.to_dense() of a sparse tensor, .to_padded_tensor(0) of a nested one), or move what the operator takes "
    "to the CPU by .cpu(). A nested tensor with layout=torch.jagged can be made on the CPU and moved by .to('xla')"
)

# What is in the names of operators that make or take such tensors, and names that do not say it.
_WORDS: Final = ("sparse", "nested", "mkldnn")
_NAMES: Final = frozenset({"aten::_spdiags", "aten::_coalesce", "aten::hspmm", "aten::sspaddmm"})


class LayoutError(NotImplementedError, TypeError):
    """A compressed sparse, nested or MKL-DNN tensor was asked for on an ``xla`` device."""


def is_about_layouts(overload: OpOverload) -> bool:
    """Whether an operator that has no lowering makes or takes tensors of another layout."""
    name = str(overload._schema.name)
    return name in _NAMES or any(word in name for word in _WORDS)


def refuse(overload: OpOverload) -> NoReturn:
    """Raise LayoutError."""
    name = str(overload._schema.name)
    raise LayoutError(MSG_LAYOUT.format(operator=name))


def check_wanted(overload: OpOverload, kwargs: Mapping[str, Operand]) -> None:
    """Raise LayoutError where the caller asks for another layout, as ``zeros_like(x, layout=...)`` may."""
    if kwargs.get("layout") not in (None, torch.strided):
        refuse(overload)


_sparse_handlers: Final[dict[OpOverload, Handler]] = {}


def _no_dispatch(_overload: OpOverload) -> Handler:
    raise RuntimeError("xla_core.dispatch has not been imported")


_make_sparse_handler: Callable[[OpOverload], Handler] = _no_dispatch


def set_sparse_handler_factory(factory: Callable[[OpOverload], Handler]) -> None:
    """Say who makes the handler of an operator that a sparse tensor meets for the first time."""
    global _make_sparse_handler
    _make_sparse_handler = factory


class SparseXLATensor(torch.Tensor):
    """A sparse tensor on an ``xla`` device; made by ``to_sparse()``, ``torch.sparse_coo_tensor`` and ``.to``."""

    __torch_function__ = torch_private.disabled_torch_function

    @staticmethod
    def __torch_dispatch__(
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        handler = _sparse_handlers.get(func)
        if handler is None:
            handler = _sparse_handlers[func] = _make_sparse_handler(func)
        return handler(args, kwargs)

    def new(self, *parts_and_size: Operand) -> torch.Tensor:
        """A sparse tensor of this device and dtype: ``new(indices, values[, size])``; SparseAdam calls it."""
        indices, values, *size = parts_and_size
        return torch.sparse_coo_tensor(
            indices, values, *size, dtype=self.dtype, device=self.device, check_invariants=False
        )

    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        # torch's own would pickle a subclass without memory by its storage
        return torch.Tensor.to, (self.detach().cpu(), str(self.device))


def make(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool
) -> SparseXLATensor:
    """The sparse tensor of ``shape`` with ``values`` at ``indices``, [sparse dimensions, count], of one device."""
    return torch_private.as_subclass(
        SparseXLATensor, reference_kernels.sparse_coo(indices, values, shape, coalesced)
    )


def parts(tensor: SparseXLATensor) -> tuple[XLATensor, XLATensor]:
    """The indices and values of a sparse tensor, those of elements that occur twice, too."""
    aten = torch.ops.aten
    indices = reference_kernels.of_any_sparse(aten._indices.default, tensor)
    return indices, reference_kernels.of_any_sparse(aten._values.default, tensor)


def replace(tensor: SparseXLATensor, source: SparseXLATensor) -> None:
    """Let ``tensor`` hold what ``source`` does: what an operator in place has made of it."""
    reference_kernels.of_any_sparse(
        torch.ops.aten.copy_sparse_to_sparse_.default, tensor, source, False
    )
