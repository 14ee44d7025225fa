"""jax's and jaxlib's private names for portable StableHLO: versioned programs that outlive a release.

The rest of what this project uses of jax and jaxlib is in ``jax_private``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Final

import jax
import numpy as np

# jax 0.10.2: what reads symbolic sizes off the arguments, and checks them, when a program runs
from jax._src.export import _export

# jax 0.10.2: the step from jaxpr to an MLIR module; contexts with all dialects that XLA accepts
from jax._src.interpreters import mlir as _mlir

# jaxlib 0.10.2: conversion between StableHLO and its portable form
from jaxlib import _jax as _jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir import passmanager as _passmanager

from xla_core.jax_bridge.jax_private import (
    STRIP_LOCATIONS,
    HasShape,
    Relocation,
    jaxpr_to_module,
    location_detail,
    module_to_bytecode,
    relocate_operations,
    stablehlo,
)
from xla_core.jax_bridge.jaxlib_runtime import JAXLIB_VERSION

# Not a name that jax knows: each primitive is lowered by the rule it has for all platforms, to
# operations of StableHLO alone.
PORTABLE: Final = "portable"

_PLAIN: Final = (
    "builtin.module(symbol-dce,"
    "func.func(chlo-legalize-to-stablehlo,shape-legalize-to-stablehlo,canonicalize,cse),symbol-dce)"
)
_REFINE: Final = (
    "builtin.module(func.func(stablehlo-legalize-composite-to-call),"
    "stablehlo-refine-arguments{{types={types}}})"
)
_SYMBOLIC_VERSION: Final = 9
"""jax's calling convention of exported functions: ``shape_assertion`` calls check sizes."""

MSG_NO_VERSION: Final = "no version of portable StableHLO has what this program needs: {reason}"
MSG_NO_PORTABLE_RULE: Final = (
    "{reason}. The operator runs in a library of the device, so it has no form that other devices and "
    "programs could run: leave it out of the exported model"
)
MSG_SIZES: Final = "these arguments' sizes do not fit what the program was exported for: {reason}"
MSG_NOT_READABLE: Final = (
    "this is not a StableHLO program that jaxlib {version} reads: {reason}. Programs of newer releases "
    "need a newer jaxlib"
)


@dataclasses.dataclass(frozen=True, slots=True)
class PortableProgram:
    """A program in StableHLO's versioned form (VHLO bytecode) and, if wanted, as text.

    ``version`` is the oldest release of StableHLO that reads it; ``text`` the module before versioning.
    """

    bytecode: bytes
    text: str | None
    version: str


def lower_portable(
    function: Callable[..., object],
    avals: Sequence[HasShape],
    name: str,
    *,
    with_text: bool,
    edit: Callable[[ir.Module], None] | None = None,
    relocate: Relocation | None = None,
) -> PortableProgram:
    """Lower ``function`` of ``len(avals)`` arrays, whose sizes may be jax's symbolic dimensions.

    Symbolic sizes become ``?``; the program reads them off its arguments. ``edit`` may change the module
    before it is simplified; ``relocate`` renames operations, which then keep their locations. Raises
    NotImplementedError for what has no form of its own in StableHLO.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    with jax.enable_x64(True), location_detail(False):
        jaxpr = jax.make_jaxpr(function)(*structs)
        try:
            module = jaxpr_to_module(jaxpr, PORTABLE, name, 1)
        except NotImplementedError as error:
            raise NotImplementedError(MSG_NO_PORTABLE_RULE.format(reason=error)) from error
        if any(not isinstance(size, int) for a in structs for size in a.shape):
            module = _with_sizes_read(module, list(jaxpr.in_avals))
    if edit is not None:
        edit(module)
    _run_passes(module, _PLAIN)
    if relocate is None:
        _run_passes(module, STRIP_LOCATIONS)
    else:
        relocate_operations(module, relocate)
    text = module.operation.get_asm(enable_debug_info=relocate is not None) if with_text else None
    bytecode, version = _versioned(module)
    return PortableProgram(bytecode, text, version)


def _with_sizes_read(module: ir.Module, avals: list[object]) -> ir.Module:
    """The module with a main function that takes arrays alone and computes the symbolic sizes."""
    # jax 0.10.2
    return _export._wrap_main_func(
        module,
        avals,
        args_kwargs_tree=jax.tree_util.tree_structure((tuple(avals), {})),
        has_platform_index_argument=False,
        module_kept_var_idx=tuple(range(len(avals))),
        serialization_version=_SYMBOLIC_VERSION,
    )


@functools.cache
def _register_passes() -> None:
    # jaxlib 0.10.2
    stablehlo.register_stablehlo_passes()


def _run_passes(module: ir.Module, pipeline: str) -> None:
    _register_passes()
    with module.context:
        _passmanager.PassManager.parse(pipeline).run(module.operation)


def _versioned(module: ir.Module) -> tuple[bytes, str]:
    """The portable form that the most readers know, and its version."""
    requirement = stablehlo.StablehloCompatibilityRequirement
    # jaxlib 0.10.2: from the oldest that readers must accept to what this jaxlib has itself
    wanted = [requirement.MAX, None, requirement.WEEK_12, requirement.WEEK_4, requirement.NONE]
    reason = ""
    for choice in wanted:
        version: str = (
            "1.0.0"
            if choice is None
            else stablehlo.get_version_from_compatibility_requirement(choice)
        )
        try:
            return _jaxlib.mlir.serialize_portable_artifact(module, version, False), version
        except Exception as error:  # jaxlib 0.10.2 raises XlaRuntimeError or ValueError
            reason = str(error).partition("\n")[0]
    raise ValueError(MSG_NO_VERSION.format(reason=reason))


def _parse(bytecode: bytes) -> ir.Module:
    # jaxlib 0.10.2; a program that is not versioned is read as it is
    context = _mlir.make_ir_context()
    try:
        return stablehlo.deserialize_portable_artifact(context, bytecode)
    except Exception as versioned:
        try:
            with context:
                return ir.Module.parse(bytecode)
        except Exception:
            reason = str(versioned).partition("\n")[0]
            text = MSG_NOT_READABLE.format(version=JAXLIB_VERSION, reason=reason)
            raise ValueError(text) from None


def from_portable(bytecode: bytes, arguments: Sequence[HasShape]) -> bytes:
    """A portable program as plain StableHLO bytecode for arguments of these shapes and dtypes.

    Symbolic sizes become those of the arguments. Raises ValueError for bytes that are no program, and
    where the arguments do not fit what the program says of its sizes.
    """
    module = _parse(bytecode)
    if not any(_is_symbolic(t) for t in _main(module).type.inputs):
        return module_to_bytecode(module)
    with module.context, ir.Location.unknown():
        types = ",".join(str(_tensor_type(a)) for a in arguments)
    _run_passes(module, _REFINE.format(types=types))
    plain = module_to_bytecode(module)
    try:
        # jaxlib 0.10.2: inlines all calls, carries the sizes through, removes the checks of sizes that
        # hold and fails for one that does not
        return _jaxlib.mlir.refine_polymorphic_shapes(
            plain, enable_shape_assertions=True, validate_static_shapes=True
        )
    except Exception as error:
        raise ValueError(MSG_SIZES.format(reason=error)) from error


def _main(module: ir.Module) -> ir.Operation:
    return ir.SymbolTable(module.operation)["main"]


def _is_symbolic(kind: ir.Type) -> bool:
    return not ir.RankedTensorType(kind).has_static_shape


def _tensor_type(aval: HasShape) -> ir.Type:
    # jax 0.10.2
    element = _mlir.dtype_to_ir_type(np.dtype(aval.dtype))
    return ir.RankedTensorType.get(aval.shape, element)


def result_shapes(bytecode: bytes) -> list[tuple[int, ...]]:
    """The shapes of what a plain StableHLO program gives."""
    with _mlir.make_ir_context():
        types = _main(ir.Module.parse(bytecode)).type.results
        return [tuple(ir.RankedTensorType(t).shape) for t in types]
