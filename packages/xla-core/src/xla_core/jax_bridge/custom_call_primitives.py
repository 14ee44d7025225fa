"""jax's private names for operations that jax has no function for: calls by name, marked values.

The rest of what this project uses of jax and jaxlib is in ``jax_private``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from jax import Array

# jax 0.10.2: primitives, and the aval type of arrays
from jax._src import core as _jax_core

# jax 0.10.2: how primitives are lowered to MLIR
from jax._src.interpreters import mlir as _mlir
from jaxlib.mlir import ir

from xla_core.jax_bridge.jax_private import stablehlo

Results = Sequence[tuple[tuple[int, ...], np.dtype]]

MARK_TARGET: Final = "xla_mark_tensor"
# XLA's typed calls, whose configuration is a dictionary
_TYPED_FFI: Final = 4


def custom_call(
    target: str,
    operands: Sequence[Array],
    results: Results,
    *,
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    frontend_attributes: Mapping[str, str] | None = None,
) -> list[Array]:
    """A ``stablehlo.custom_call`` of ``target``, one array per (shape, dtype) of ``results``."""
    return _call_p.bind(
        *operands,
        target=target,
        results=tuple(results),
        has_side_effect=has_side_effect,
        backend_config=backend_config,
        api_version=api_version,
        frontend_attributes=tuple(sorted((frontend_attributes or {}).items())),
    )


def _results_of_call(*_operands: object, results: Results, **_: object) -> list[Array]:
    return [_jax_core.ShapedArray(shape, dtype) for shape, dtype in results]


def _lower_call(
    ctx: _mlir.LoweringRuleContext,
    *operands: Array,
    target: str,
    results: Results,
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    frontend_attributes: tuple[tuple[str, str], ...],
) -> object:
    types = [_mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = stablehlo.CustomCallOp(
        types,
        operands,
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(has_side_effect),
        backend_config=_config(backend_config, api_version),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), api_version),
    )
    if frontend_attributes:
        call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
            {name: ir.StringAttr.get(value) for name, value in frontend_attributes}
        )
    return call.results


def _config(text: str, api_version: int) -> ir.Attribute:
    if api_version == _TYPED_FFI:
        return ir.Attribute.parse(text or "{}")
    return ir.StringAttr.get(text)


_call_p: Final = _jax_core.Primitive("xla_custom_call")
_call_p.multiple_results = True
_call_p.def_abstract_eval(_results_of_call)
_mlir.register_lowering(_call_p, _lower_call)


# --- marks ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A value's place in a composite: ``position`` among the operands or results of instance ``id``.

    ``attributes`` is a JSON object or ``null``; that of the first result counts.
    """

    name: str
    position: int
    id: str
    is_input: bool
    attributes: str


def mark(value: Array, place: Mark) -> Array:
    """``value``, marked; ``composite_pass`` makes composites of the marks, or removes them."""
    return _mark_p.bind(value, place=place)


def _lower_mark(ctx: _mlir.LoweringRuleContext, value: Array, *, place: Mark) -> object:
    call = stablehlo.CustomCallOp(
        [value.type],
        [value],
        call_target_name=ir.StringAttr.get(MARK_TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        backend_config=ir.StringAttr.get(json.dumps(dataclasses.asdict(place))),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
    )
    return call.results


_mark_p: Final = _jax_core.Primitive("xla_mark")
_mark_p.def_abstract_eval(lambda aval, *, place: aval)
_mlir.register_lowering(_mark_p, _lower_mark)
