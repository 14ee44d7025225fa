"""Lowers the jaxpr of a small program operation by operation.

jax makes a function of each operation, calls it and inlines the call, so that equal operations are lowered once.
In a small program few are equal, and that takes as long again as lowering them all.
"""

from __future__ import annotations

from typing import Any, Final

# jax 0.10.2: the flag of the tracing context that says how much of a traceback each op records.
from jax._src import config as _jax_config

# jax 0.10.2: Literal, and the constants that jax would hoist
from jax._src import core as _jax_core

# jax 0.10.2: the stack of names that become the operations' locations
from jax._src import source_info_util as _source_info

# jax 0.10.2: ModuleContext, LoweringRuleContext, the rules of primitives and what calls them
from jax._src.interpreters import mlir as _mlir

# jaxlib 0.10.2: MLIR bindings
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func as _func

from xla_core.jax_bridge.jax_versions import SINCE_0_11

MOST_OPERATIONS: Final = 32
"""24 operations, all different, take 1.3 ms instead of 2.1; 72, a third of them different, 3.4 instead of 2.7."""


def takes(lowering: _mlir.ModuleContext, jaxpr: _jax_core.ClosedJaxpr) -> bool:
    """Whether ``lower_main`` makes of this jaxpr what jax would: it is small, without lines of source files."""
    equations = jaxpr.jaxpr.eqns
    return (
        not SINCE_0_11
        and not _jax_config.traceback_in_locations_limit.value
        and len(equations) <= MOST_OPERATIONS
        and not jaxpr.consts
        and not _jax_core.jaxpr_const_args(jaxpr.jaxpr)
        and not any(e.primitive in _mlir._uncacheable_primitives for e in equations)
        and all(_mlir._get_lowering_rules(lowering, e.primitive, e.ctx)[2] for e in equations)
    )


def lower_main(lowering: _mlir.ModuleContext, jaxpr: _jax_core.ClosedJaxpr, name: str) -> None:
    """Add the function ``main``, which computes ``jaxpr``; locations of its operations begin with ``name``."""
    kind = ir.FunctionType.get(
        [_mlir.aval_to_ir_type(lowering, aval) for aval in jaxpr.in_avals],
        [_mlir.aval_to_ir_type(lowering, aval) for aval in jaxpr.out_avals],
    )
    function = _func.FuncOp("main", kind, ip=lowering.ip)
    function.attributes["sym_visibility"] = ir.StringAttr.get("public")
    function.result_attrs = ir.ArrayAttr.get([ir.DictAttr.get({})] * len(jaxpr.out_avals))
    lowering.symbol_table.insert(function)
    block = function.add_entry_block()
    stack = _source_info.new_name_stack(name)
    with ir.InsertionPoint(block), ir.Location.name(name):
        known: dict[Any, Any] = dict(zip(jaxpr.jaxpr.invars, block.arguments, strict=True))
        for equation in jaxpr.jaxpr.eqns:
            results = _lower(lowering, equation, [_read(v, known) for v in equation.invars], stack)
            known.update(zip(equation.outvars, results, strict=True))
        _func.return_([_read(v, known) for v in jaxpr.jaxpr.outvars])


def _read(value: Any, known: dict[Any, Any]) -> ir.Value:
    if type(value) is _jax_core.Literal:
        return _mlir.ir_constant(value.val, aval=value.aval)
    return known[value]


def _lower(
    lowering: _mlir.ModuleContext,
    equation: _jax_core.JaxprEqn,
    operands: list[ir.Value],
    stack: _source_info.NameStack,
) -> Any:
    """The results of one operation."""
    primitive = equation.primitive
    names = stack + equation.source_info.name_stack
    rules, default, _ = _mlir._get_lowering_rules(lowering, primitive, equation.ctx)
    context = _mlir.LoweringRuleContext(
        module_context=lowering, primitive=primitive, name_stack=names, traceback=None,
        avals_in=[v.aval for v in equation.invars], avals_out=[v.aval for v in equation.outvars],
        tokens_in=_mlir.TokenSet(), tokens_out=None, jaxpr_eqn_ctx=equation.ctx, const_lowering={},
    )  # fmt: skip
    with ir.Location.name(f"{names}/{primitive.name}"), equation.ctx.manager:
        return _mlir._uncached_lowering(
            primitive, equation.ctx, equation.effects, rules, default, context,
            *operands, **equation.params,
        )  # fmt: skip
