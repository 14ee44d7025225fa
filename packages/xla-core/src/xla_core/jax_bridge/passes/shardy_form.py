"""Partitioned programs, rewritten for Shardy: XLA's newer partitioner, which names axes of one mesh.

Programs are traced with HLO shardings, lists of devices, which the older one (GSPMD) reads. Either reads only its
own form, so a program is rewritten as a whole or not at all. It stays as it is where no mesh has all of its
shardings, and where a region of manual sharding cannot be made one operation (``manual_regions``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Final

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits modules.
from jaxlib.mlir import ir

# jaxlib 0.10.2: builders of Shardy's operations.
from jaxlib.mlir.dialects import sdy

from xla_core.jax_bridge.module_attributes import all_operations
from xla_core.jax_bridge.passes import manual_regions
from xla_core.jax_bridge.passes.manual_constants import SHARDING, call_target

_SHARDY: Final = "sdy.sharding"
_MANUAL: Final = "{manual}"
_ALIKE: Final = re.compile(r"\{unknown shard_as (\d+)\}")
# Where a function's type and its attributes have its arguments, and its results.
_LISTS: Final = {"arg_attrs": "inputs", "res_attrs": "results"}

MeshOf = Callable[[Collection[str]], manual_regions.Mesh | None]
"""The mesh in whose axes all of some HLO shardings can be written, or None."""


def convert(module: ir.Module, mesh_of: MeshOf) -> None:
    """Rewrite the shardings of a module, if all of them can be."""
    functions = [f for f in module.body.operations if f.operation.name == "func.func"]
    entries = [e for f in functions for name in _LISTS for e in _entries(f, name)]
    shardings = {text for e in entries if (text := _text(e)) is not None}
    for text in map(_text, all_operations(module.body)):
        # parts are in regions here; a program that takes or gives parts has no mesh
        if text is not None and text != _MANUAL and not _ALIKE.fullmatch(text):
            shardings.add(text)
    mesh = mesh_of(shardings) if shardings else None
    if mesh is None:
        return
    with module.context, ir.Location.unknown():
        if not manual_regions.outline(module, mesh):
            return
        for function in functions:
            _convert_ends(function, mesh)
        for operation in list(all_operations(module.body)):
            if call_target(operation) == "Sharding":
                _convert_annotation(operation, mesh)


def _entries(function: ir.Operation, name: str) -> Iterator[ir.DictAttr]:
    """The attributes of each argument or each result of a function."""
    if name in function.attributes:
        yield from map(ir.DictAttr, ir.ArrayAttr(function.attributes[name]))


def _text(holder: ir.Operation | ir.DictAttr) -> str | None:
    attributes = holder if isinstance(holder, ir.DictAttr) else holder.attributes
    return str(ir.StringAttr(attributes[SHARDING]).value) if SHARDING in attributes else None


def _convert_ends(function: ir.Operation, mesh: manual_regions.Mesh) -> None:
    """Rewrite the shardings of a function's arguments and results."""
    for name, kinds in _LISTS.items():
        entries = list(_entries(function, name))
        if not any(SHARDING in entry for entry in entries):
            continue
        rewritten = []
        for entry, kind in zip(entries, getattr(function.type, kinds), strict=True):
            named = {entry[i].name: entry[i].attr for i in range(len(entry))}
            text = _text(entry)
            if text is not None:
                del named[SHARDING]
                rank = ir.RankedTensorType(kind).rank
                named[_SHARDY] = ir.Attribute.parse(mesh.translate(text, rank))
            rewritten.append(ir.DictAttr.get(named))
        function.attributes[name] = ir.ArrayAttr.get(rewritten)


def _convert_annotation(call: ir.Operation, mesh: manual_regions.Mesh) -> None:
    """Replace a call that annotates its operand by Shardy's operation, or by nothing among parts."""
    value, text = call.operands[0], _text(call)
    assert text is not None  # such a call has one
    alike = _ALIKE.fullmatch(text)
    if alike:
        with ir.InsertionPoint(call):
            sdy.ShardingGroupOp(value, int(alike[1]))
    elif text != _MANUAL:
        sharding = mesh.translate(text, ir.RankedTensorType(value.type).rank)
        with ir.InsertionPoint(call), call.location:
            value = sdy.ShardingConstraintOp(value, ir.Attribute.parse(sharding)).result
    call.results[0].replace_all_uses_with(value)
    call.erase()
