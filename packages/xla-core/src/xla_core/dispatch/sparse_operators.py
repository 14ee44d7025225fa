"""Operators of sparse tensors on ``xla``: what takes them apart or puts them together is done on the device.

All other operators that take one run on the CPU, as operators without a lowering do: sparse results come back
as sparse tensors of the device, dense ones as dense ones.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.dispatch import layouts
from xla_core.dispatch.cpu_fallback import fallback_handler
from xla_core.dispatch.functional import composite_handler
from xla_core.dispatch.layouts import (
    SparseXLATensor,
    make,
    parts,
    set_sparse_handler_factory,
)
from xla_core.operators.schema import signature
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of
from xla_core.torch_bridge import reference_kernels
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

aten = torch.ops.aten

# What C++ answers from the tensor itself, or changes in it.
_HELD: Final = (
    aten._indices.default, aten._values.default, aten.indices.default, aten.values.default,
    aten._nnz.default, aten.is_coalesced.default, aten._coalesced_.default, aten.sparse_dim.default,
    aten.dense_dim.default, aten._dimI.default, aten._dimV.default,
)  # fmt: skip


def to_sparse(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``to_sparse()`` and ``to_sparse(sparse_dim)`` of a dense tensor; counting what is not zero reads."""
    tensor, named = args[0], kwargs or {}
    own = len(args) > 1 and isinstance(args[1], int)
    layout = named.get("layout", None if own or len(args) < 2 else args[1])
    overload = aten._to_sparse.sparse_dim if own else aten._to_sparse.default
    if layout not in (None, torch.sparse_coo):
        layouts.refuse(overload)
    count = args[1] if own else tensor.dim() - (named.get("dense_dim") or 0)
    if not 0 < count <= tensor.dim() or named.get("blocksize") is not None:
        return _on_cpu(overload, args, kwargs)
    there = tensor != 0
    if count < tensor.dim():
        there = there.flatten(count).any(-1)
    indices = there.nonzero().t().contiguous()
    return make(indices, tensor[tuple(indices)], tuple(tensor.shape), coalesced=True)


def with_parts(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """The sparse tensor of given indices and values, which ``torch.sparse_coo_tensor`` has checked."""
    _sparse, _dense, shape, indices, values = args
    coalesced = bool((kwargs or {}).get("is_coalesced"))
    return make(indices, values, tuple(shape), coalesced)


def _again(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    source = args[0]
    return make(*parts(source), tuple(source.shape), source.is_coalesced())


def _clone(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    source = args[0]
    indices, values = (part.clone() for part in parts(source))
    return make(indices, values, tuple(source.shape), source.is_coalesced())


def _to_copy(args: Operands, kwargs: NamedOperands | None) -> Operand:
    source, named = args[0], kwargs or {}
    device = torch.device(named.get("device") or source.device)
    indices, values = parts(source)
    indices, values = indices.to(device), values.to(device, named.get("dtype") or source.dtype)
    shape, coalesced = tuple(source.shape), source.is_coalesced()
    if device.type == "xla":
        return make(indices, values, shape, coalesced)
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=False
    )


def _to_dense(args: Operands, kwargs: NamedOperands | None) -> Operand:
    source, named = args[0], kwargs or {}
    if (args[1] if len(args) > 1 else named.get("dtype")) is not None:
        return _on_cpu(aten._to_dense.default, args, kwargs)  # which raises
    indices, values = parts(source)
    dense = torch.zeros(source.shape, dtype=values.dtype, device=source.device)
    if len(indices) == 0:
        dense += values.sum(0)
    elif values.numel():
        dense.index_put_(tuple(indices), values, accumulate=True)
    return dense


def _t(args: Operands, kwargs: NamedOperands | None) -> Operand:
    source = args[0]
    if source.sparse_dim() != 2 or source.dense_dim():
        return _on_cpu(aten.t.default, args, kwargs)
    indices, values = parts(source)
    return make(indices.flip(0), values, tuple(source.shape[::-1]), coalesced=False)


def _coalesce(args: Operands, kwargs: NamedOperands | None) -> Operand:
    source = args[0]
    if source.is_coalesced():
        return source
    indices, values = parts(source)
    if not indices.numel() or values.dtype is torch.bool:
        return _on_cpu(aten._coalesce.default, args, kwargs)
    sizes = source.shape[: source.sparse_dim()]
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    places = sum(row * step for row, step in zip(indices, steps, strict=True))
    distinct, inverse = torch.unique(places, return_inverse=True)
    sums = torch.zeros(len(distinct), *values.shape[1:], dtype=values.dtype, device=values.device)
    rows = [distinct // step % size for step, size in zip(steps, sizes, strict=True)]
    return make(torch.stack(rows), sums.index_add(0, inverse, values), tuple(source.shape), True)


def sparse_mask(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``sparse_mask``: the elements of a dense tensor where a sparse one has any."""
    dense, mask = args
    here = isinstance(dense, XLATensor) and isinstance(mask, SparseXLATensor)
    if not here or dense.shape != mask.shape or not mask.is_coalesced() or not mask.sparse_dim():
        return refusing_handler(aten.sparse_mask.default)(args, kwargs)
    indices, _values = parts(mask)
    return make(indices, dense[tuple(indices)], tuple(mask.shape), coalesced=True)


def _adds_here(args: Operands) -> bool:
    dense, sparse = args[0], args[1]
    return (
        isinstance(dense, XLATensor)
        and isinstance(sparse, SparseXLATensor)
        and (dense.shape, dense.dtype) == (sparse.shape, sparse.dtype)
        and sparse.sparse_dim() > 0
        and dense.dtype is not torch.bool
    )


def _add_(args: Operands, kwargs: NamedOperands | None) -> Operand:
    if not _adds_here(args):
        return _on_cpu(aten.add_.Tensor, args, kwargs)
    indices, values = parts(args[1])
    scaled = values * (kwargs or {}).get("alpha", 1)
    return args[0].index_put_(tuple(indices), scaled, accumulate=True)


def _add(args: Operands, kwargs: NamedOperands | None) -> Operand:
    if not _adds_here(args):
        return _on_cpu(aten.add.Tensor, args, kwargs)
    return _add_((args[0].clone(), args[1]), kwargs)


_BESIDE_DENSE: Final[dict[OpOverload, Handler]] = {aten.add.Tensor: _add, aten.add_.Tensor: _add_}


def beside_dense(overload: OpOverload) -> Handler:
    """The handler of an operator that dense tensors cannot carry out: a sparse one is among the operands.

    Or its results have shapes that only the CPU can tell.
    """
    return _BESIDE_DENSE.get(overload) or fallback_handler(overload, signature(overload))


def _on_cpu(overload: OpOverload, args: Operands, kwargs: NamedOperands | None) -> Operand:
    return fallback_handler(overload, signature(overload))(args, kwargs)


def _product(sparse: Operand, dense: Operand) -> torch.Tensor:
    """``sparse @ dense`` of two matrices: what of ``dense`` meets no element of ``sparse`` is not looked at."""
    indices, values = parts(sparse)
    rows = torch.zeros(sparse.shape[0], dense.shape[1], dtype=values.dtype, device=dense.device)
    return rows.index_add(0, indices[0], values[:, None] * dense[indices[1]])


def _multiplies_here(sparse: Operand, dense: Operand) -> bool:
    return (
        isinstance(sparse, SparseXLATensor)
        and isinstance(dense, XLATensor)
        and (sparse.dim(), sparse.dense_dim(), dense.dim()) == (2, 0, 2)
        and (sparse.shape[1], sparse.dtype) == (dense.shape[0], dense.dtype)
    )


def _mm(args: Operands, kwargs: NamedOperands | None) -> Operand:
    if _multiplies_here(*args):
        return _product(*args)
    return _on_cpu(aten.mm.default, args, kwargs)


def sparse_addmm(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``sparse.mm`` and ``sparse.addmm``; of dense tensors an ordinary product, as on the CPU."""
    summand, left, right = args[:3]
    if all(isinstance(a, XLATensor) for a in (summand, left, right)):
        return handler_of(aten.addmm.default)(args, kwargs)
    overload = aten._sparse_addmm.default
    if not (isinstance(summand, XLATensor) and _multiplies_here(left, right)):
        return refusing_handler(overload)(args, kwargs)
    scales = {"beta": 1, "alpha": 1} | (kwargs or {})
    product = _product(left, right) * scales["alpha"]
    return product if scales["beta"] == 0 else product + summand * scales["beta"]


_OWN: Final[dict[OpOverload, Handler]] = {
    aten.detach.default: _again,
    aten.alias.default: _again,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._to_dense.default: _to_dense,
    aten._coalesce.default: _coalesce,
    aten._sparse_addmm.default: sparse_addmm,
    aten.mm.default: _mm,
    aten.t.default: _t,
    aten.add.Tensor: _add,
    aten.sparse_mask.default: sparse_mask,
}


def _held(overload: OpOverload) -> Handler:
    return lambda args, _kwargs: reference_kernels.of_any_sparse(overload, *args)


def make_handler(overload: OpOverload) -> Handler:
    """The handler of an operator that a sparse tensor is among the operands of."""
    if overload in _OWN:
        return _OWN[overload]
    if overload in _HELD:
        return _held(overload)
    if overload._can_decompose():
        return composite_handler(overload)
    return fallback_handler(overload, signature(overload))


def refusing_handler(overload: OpOverload) -> Handler:
    """For an operator about layouts, of dense tensors: refused, unless a sparse tensor is among them."""
    on_cpu = fallback_handler(overload, signature(overload))

    def handler(args: Operands, kwargs: NamedOperands | None) -> Operand:
        named = (kwargs or {}).values()
        if any(isinstance(a, SparseXLATensor) for a in (*args, *named)):
            return on_cpu(args, kwargs)
        return layouts.refuse(overload)

    return handler


def install() -> None:
    """Connect sparse tensors to the dispatcher."""
    set_sparse_handler_factory(make_handler)
