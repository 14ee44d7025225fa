"""jax's private names for operations of HLO that jax has no public function for.

Sorting and scattering by any computation, and calls of whole modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import ml_dtypes
import numpy as np
from jax import Array

# jax 0.10.2: primitives, and the aval type of arrays
from jax._src import core as _jax_core

# jax 0.10.2: how primitives are lowered to MLIR, and how modules are merged
from jax._src.interpreters import mlir as _mlir

# jax 0.10.2: operations whose public functions take no computation of the caller's
from jax._src.lax import lax as _lax
from jax._src.lax import slicing as _slicing
from jax._src.lax import windowed_reductions as _windows
from jaxlib import _jax as _jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from xla_core.jax_bridge.jax_private import stablehlo

select_and_scatter = _windows._select_and_scatter  # jax 0.10.2

MSG_MODULE: Final = "this is neither a serialized HLO module nor StableHLO: {error}"
MSG_TYPE: Final = (
    "a module's function main has a {kind} of type {type}; it needs arrays of fixed shapes"
)
_MLIR_MAGIC: Final = b"ML\xefR"

_DTYPES: Final = {
    "i1": np.dtype(np.bool_),
    **{f"i{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"ui{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"f{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "complex<f32>": np.dtype(np.complex64),
    "complex<f64>": np.dtype(np.complex128),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype of one argument or result of a module."""

    shape: tuple[int, ...]
    dtype: np.dtype


def to_stablehlo(module: bytes) -> bytes:
    """StableHLO bytecode of a serialized HloModuleProto; what is StableHLO already stays as it is.

    Raises ValueError for anything else.
    """
    if module.startswith(_MLIR_MAGIC):
        return module
    try:
        converted: bytes = _jaxlib.mlir.hlo_to_stablehlo(module)  # jaxlib 0.10.2
    except (RuntimeError, ValueError) as error:
        raise ValueError(MSG_MODULE.format(error=error)) from error
    return converted


def hlo_proto(module: bytes) -> bytes:
    """The serialized HloModuleProto of StableHLO bytecode."""
    # jaxlib 0.10.2
    computation = _jaxlib.mlir.mlir_module_to_xla_computation(module, False, False)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto


def signature(module: bytes) -> tuple[list[Aval], list[Aval]]:
    """Arguments and results of a StableHLO module. Raises ValueError for shapes that are not fixed."""
    with _mlir.make_ir_context():  # jax 0.10.2
        main = ir.SymbolTable(ir.Module.parse(module).operation)["main"]
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        return (
            [_aval(t, "argument") for t in kind.inputs],
            [_aval(t, "result") for t in kind.results],
        )


def _aval(type_: object, kind: str) -> Aval:
    array = type_ if isinstance(type_, ir.RankedTensorType) else None
    dtype = _DTYPES.get(str(array.element_type)) if array is not None else None
    if array is None or dtype is None or not array.has_static_shape:
        raise ValueError(MSG_TYPE.format(kind=kind, type=type_))
    return Aval(tuple(array.shape), dtype)


def call_module(
    module: bytes, name: str, operands: Sequence[Array], results: Sequence[Aval]
) -> Array:
    """The results of a StableHLO module's function ``main``, which becomes part of the program."""
    return _module_p.bind(*operands, module=module, name=name, results=tuple(results))


def _lower_module(
    ctx: _mlir.LoweringRuleContext,
    *operands: Array,
    module: bytes,
    name: str,
    results: tuple[Aval, ...],
) -> object:
    parsed = ir.Module.parse(module)
    context = ctx.module_context
    # jax 0.10.2
    callee = _mlir.merge_mlir_modules(context.module, name, parsed, dst_symtab=context.symbol_table)
    types = [_mlir.aval_to_ir_type(context, aval) for aval in ctx.avals_out]
    call = func.CallOp(types, ir.FlatSymbolRefAttr.get(callee), operands)
    return call.results


def scatter(
    operand: Array,
    indices: Array,
    updates: Array,
    update: Callable[[object, object], object],
    numbers: object,
    indices_are_sorted: bool,
    unique_indices: bool,
) -> Array:
    """HLO's scatter: ``update(old, new)`` where the indices say; places outside are left out."""
    # jax 0.10.2
    jaxpr, constants = _lax._reduction_jaxpr(update, _jax_core.ShapedArray((), operand.dtype))
    return _slicing.scatter_p.bind(
        operand,
        indices,
        updates,
        update_jaxpr=jaxpr,
        update_consts=constants,
        dimension_numbers=numbers,
        indices_are_sorted=indices_are_sorted,
        unique_indices=unique_indices,
        mode=_slicing.GatherScatterMode.FILL_OR_DROP,
    )


_module_p: Final = _jax_core.Primitive("xla_module")
_module_p.multiple_results = True
_module_p.def_abstract_eval(
    lambda *_operands, module, name, results: [
        _jax_core.ShapedArray(r.shape, r.dtype) for r in results
    ]
)
_mlir.register_lowering(_module_p, _lower_module)


def sort(
    operands: Sequence[Array], before: Callable[..., object], dimension: int, stable: bool
) -> list[Array]:
    """``operands`` sorted along ``dimension`` by ``before``, which says which of two elements is first.

    ``before`` takes two scalars of each operand, ``(a0, b0, a1, b1, ...)``, and gives a boolean.
    """
    return _sort_p.bind(*operands, before=before, dimension=dimension, stable=stable)


def _lower_sort(
    ctx: _mlir.LoweringRuleContext, *operands: Array, before: Array, dimension: int, stable: bool
) -> object:
    op = stablehlo.SortOp(
        [operand.type for operand in operands],
        operands,
        dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dimension),
        is_stable=ir.BoolAttr.get(stable),
    )
    scalars = [_jax_core.ShapedArray((), a.dtype) for a in ctx.avals_in for _ in range(2)]
    types = [_mlir.aval_to_ir_type(ctx.module_context, a) for a in scalars]
    block = op.comparator.blocks.append(*types)
    with ir.InsertionPoint(block):
        # jax 0.10.2
        inner = ctx.replace(
            primitive=None,
            avals_in=scalars,
            avals_out=[_jax_core.ShapedArray((), np.dtype(np.bool_))],
        )
        (result,) = _mlir.lower_fun(before, multiple_results=False)(inner, *block.arguments)
        stablehlo.return_([result])
    return op.results


_sort_p: Final = _jax_core.Primitive("xla_sort")
_sort_p.multiple_results = True
_sort_p.def_abstract_eval(
    lambda *operands, before, dimension, stable: [
        _jax_core.ShapedArray(a.shape, a.dtype) for a in operands
    ]
)
_mlir.register_lowering(_sort_p, _lower_sort)
