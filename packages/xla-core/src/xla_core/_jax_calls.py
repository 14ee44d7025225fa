"""jax's private names for operations that jax has no function for: calls by name, marked values.

The rest of what this project uses of jax and jaxlib is in ``_jax_compat``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

# jax 0.10.2: primitives, and the aval type of arrays
from jax._src import core as _jax_core

# jax 0.10.2: how primitives are lowered to MLIR
from jax._src.interpreters import mlir as _mlir
from jaxlib.mlir import ir

from xla_core._jax_compat import stablehlo

Results = Sequence[tuple[tuple[int, ...], np.dtype]]


def custom_call(
    target: str,
    operands: Sequence[Any],
    results: Results,
    *,
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    frontend_attributes: Mapping[str, str] | None = None,
) -> list[Any]:
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


def _results_of_call(*_operands: Any, results: Results, **_: Any) -> list[Any]:
    return [_jax_core.ShapedArray(shape, dtype) for shape, dtype in results]


def _lower_call(
    ctx: Any,
    *operands: Any,
    target: str,
    results: Results,
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    frontend_attributes: tuple[tuple[str, str], ...],
) -> Any:
    types = [_mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = stablehlo.CustomCallOp(
        types,
        operands,
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(has_side_effect),
        backend_config=ir.StringAttr.get(backend_config),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), api_version),
    )
    if frontend_attributes:
        call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
            {name: ir.StringAttr.get(value) for name, value in frontend_attributes}
        )
    return call.results


_call_p: Final = _jax_core.Primitive("xla_custom_call")
_call_p.multiple_results = True
_call_p.def_abstract_eval(_results_of_call)
_mlir.register_lowering(_call_p, _lower_call)
