"""MLIR contexts that are used again: making one, with all of jax's dialects, takes 3 ms.

A context keeps every type, attribute and constant that was ever made in it, so it is replaced by a new
one from time to time. Each thread has its own.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Final, TypeAlias

# jax 0.10.2: a context in which all dialects that XLA accepts are loaded; what lowers a jaxpr into one
from jax._src.interpreters import mlir as _mlir

# jaxlib 0.10.2: MLIR bindings
from jaxlib.mlir import ir

from xla_core.jax_bridge import direct_lowering

Module: TypeAlias = ir.Module

# jax 0.12 hands the same context out again, up to ten times; this is what makes one, as make_ir_context does before
_make_context: Final = getattr(_mlir, "_create_ir_context", None) or _mlir.make_ir_context

MOST_USES: Final = 256
MOST_BYTES: Final = 16 << 20
"""Bytecode of the modules that were read or made in a context: about what its constants take."""

_BYTECODE: Final = b"ML\xefR"


class _Kept(threading.local):
    context: object = None
    uses = 0
    nbytes = 0


_kept = _Kept()


def context(nbytes: int = 0) -> Any:
    """An MLIR context for one module, of ``nbytes`` of bytecode as far as that is known.

    The module may outlive the context's replacement.
    """
    if _kept.context is None or _kept.uses >= MOST_USES or _kept.nbytes > MOST_BYTES:
        _kept.context = _make_context()
        _kept.uses = _kept.nbytes = 0
    _kept.uses += 1
    _kept.nbytes += nbytes
    return _kept.context


def parsed(stablehlo: bytes) -> ir.Module | None:
    """The StableHLO module of MLIR bytecode, in this thread's context.

    None for what is not readable, and for portable artifacts: their module is VHLO, which jaxlib converts
    only where it reads the bytecode itself.
    """
    if not stablehlo.startswith(_BYTECODE):
        return None
    with context(len(stablehlo)):
        try:
            module = ir.Module.parse(stablehlo)
        except (ir.MLIRError, ValueError):
            return None
        return module if any(map(_is_main, module.body.operations)) else None


def _is_main(operation: Any) -> bool:
    if operation.operation.name != "func.func":
        return False
    return ir.StringAttr(operation.attributes["sym_name"]).value == "main"


def count(nbytes: int) -> None:
    """Count bytes of a module that was made in this thread's context."""
    _kept.nbytes += nbytes


def lower_jaxpr(
    jaxpr: Any, platform: str, name: str, axis_context: Any, results: dict[str, Any]
) -> tuple[ir.Module, list[object]]:
    """The module of a jaxpr of fixed sizes, for one partition, and the Python functions it calls back.

    What jax's ``lower_jaxpr_to_module`` does for such a one, in a context that was there already.
    Raises ValueError for what is not a valid module.
    """
    # jax 0.10.2: all names of _mlir below. 0.11.2 and 0.12.0 take the same arguments, and ``results``.
    lowering = _mlir.ModuleContext(
        backend=None,
        platforms=(platform,),
        axis_context=axis_context,
        keepalives=[],
        channel_iterator=itertools.count(_mlir.COLLECTIVE_CHANNEL_ID + 1),
        host_callbacks=[],
        lowering_parameters=_mlir.LoweringParameters(hoist_constants_as_args=False),
        context=context(),
    )
    module = lowering.module
    with lowering.context, ir.Location.unknown(lowering.context):
        attributes = module.operation.attributes
        attributes["sym_name"] = ir.StringAttr.get(_mlir.sanitize_name(name).rstrip("_"))
        attributes["mhlo.num_replicas"] = attributes["mhlo.num_partitions"] = _mlir.i32_attr(1)
        if direct_lowering.takes(lowering, jaxpr):
            direct_lowering.lower_main(lowering, jaxpr, name)
        else:
            _mlir.lower_jaxpr_to_fun(
                lowering, name, jaxpr, [],
                num_const_args=0, main_function=True, in_avals=list(jaxpr.in_avals), **results,
            )  # fmt: skip
        try:
            valid = module.operation.verify()
        except ir.MLIRError as error:
            raise ValueError(f"{name} is not a valid module: {error}") from error
    if not valid:
        raise ValueError(f"{name} is not a valid module:\n{module}")
    return module, lowering.host_callbacks
