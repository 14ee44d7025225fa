"""Programs in which values are laid out by hand for a while: what XLA's partitioner needs beside the marks.

It lays out a constant as one of its users needs it, and XLA merges equal constants first. One that is used both
between the marks and outside would become manual outside, where the partitioner (jaxlib 0.10.2) aborts the
process: a sum in both places is enough. A number gets a constant of its own; what is computed from constants
alone, such as a range, is marked where it begins to be used, as a whole value of which each device holds all.
"""

from __future__ import annotations

from typing import Final

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits modules.
from jaxlib.mlir import ir

from xla_core.jax_bridge.module_attributes import all_operations

BEGINS: Final = "SPMDFullToShardShape"
"""The call whose result is the part that each device holds."""
ENDS: Final = "SPMDShardToFullShape"
"""The call that makes a whole value of such parts."""
REGION: Final = "sdy.manual_computation"
"""What ``manual_regions`` makes of all that lies between."""
SHARDING: Final = "mhlo.sharding"
"""The attribute with an HLO sharding."""

# Dimensions of size 1 that no other constant has: equal constants of one shape would be merged again.
_OWN_SHAPE: Final = (1,) * 9


def separate_constants(module: ir.Module) -> None:
    """Give what is computed on parts constants of its own, marked as parts; other programs stay as they are."""
    with module.context, ir.Location.unknown():
        for function in module.body.operations:
            if function.operation.name == "func.func":
                for block in function.regions[0].blocks:
                    _separate(list(block.operations))


def computed_on_parts(module: ir.Module) -> set[int]:
    """The hashes of the operations on parts, of all functions, and of functions that those call."""
    keys, called = set[int](), list[str]()
    for operation in all_operations(module.body):
        if operation.name == REGION:
            inner = list(all_operations(operation.regions[0].blocks[0]))
            keys |= set(map(_key, inner))
            called += map(called_function, inner)
    functions = {}
    for function in module.body.operations:
        if function.operation.name == "func.func":
            functions[ir.StringAttr(function.attributes["sym_name"]).value] = function
            for block in function.regions[0].blocks:
                operations = list(block.operations)
                if any(call_target(operation) == BEGINS for operation in operations):
                    inside = _inside(operations)
                    keys |= inside
                    called += (called_function(o) for o in operations if _key(o) in inside)
    while called:
        function = functions.pop(called.pop(), None)
        if function is not None:
            operations = list(all_operations(function.regions[0].blocks[0]))
            keys |= {_key(operation) for operation in operations}
            called += map(called_function, operations)
    return keys


def called_function(operation: ir.Operation) -> str:
    """The name of the function that an operation calls; empty if it calls none."""
    if operation.operation.name != "func.call":
        return ""
    return str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)


def _separate(operations: list[ir.Operation]) -> None:
    if not any(call_target(operation) == BEGINS for operation in operations):
        return
    inside = _inside(operations)
    for operation in operations:
        if operation.operation.name != "stablehlo.constant":
            continue
        uses = [use for use in operation.results[0].uses if _key(use.owner) in inside]
        value = ir.DenseElementsAttr(operation.attributes["value"])
        if uses and value.is_splat:
            own = _own_constant(operation, value)
            for use in uses:
                use.owner.operands[use.operand_number] = own
    constants = _constants(operations)
    marked: dict[ir.Value, ir.Value] = {}
    for operation in operations:
        if _key(operation) not in inside or _key(operation) in constants:
            continue
        for number, value in enumerate(operation.operands):
            if hasattr(value.owner, "operation") and _key(value.owner) in constants:
                if value not in marked:
                    marked[value] = _marked(value)
                operation.operands[number] = marked[value]


def _key(operation: ir.Operation) -> int:
    # each look at an operation is another Python object; their hash is the operation's
    return hash(operation.operation)


def _inside(operations: list[ir.Operation]) -> set[int]:
    """The operations on parts, and those on constants alone that are for them."""
    on_parts, inside, constant = set[int](), set[int](), set[int]()
    for operation in operations:
        key, sources = _key(operation), _sources(operation)
        if not on_parts.isdisjoint(sources):
            inside.add(key)
        if call_target(operation) == BEGINS or (key in inside and call_target(operation) != ENDS):
            on_parts.add(key)
        elif constant.issuperset(sources):
            constant.add(key)
    for operation in reversed(operations):
        users = {_key(use.owner) for result in operation.results for use in result.uses}
        if _key(operation) in constant and users and users <= inside:
            inside.add(_key(operation))
    return inside


def _constants(operations: list[ir.Operation]) -> set[int]:
    """The operations whose value is known before the program runs, but for own constants."""
    constant = set[int]()
    for operation in operations:
        if constant.issuperset(_sources(operation)) and call_target(operation) is None:
            constant.add(_key(operation))
    return constant


def _marked(value: ir.Value) -> ir.Value:
    """A whole value as what each device holds."""
    for target, sharding in (("Sharding", "{replicated}"), (BEGINS, "{manual}")):
        attributes = {
            "call_target_name": ir.StringAttr.get(target),
            SHARDING: ir.StringAttr.get(sharding),
        }
        with ir.InsertionPoint.after(value.owner):
            call = ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes)
        value = call.results[0]
    return value


def _sources(operation: ir.Operation) -> set[int]:
    """The operations that made the operands; 0 for an argument of the function."""
    return {_key(v.owner) if hasattr(v.owner, "operation") else 0 for v in operation.operands}


def call_target(operation: ir.Operation) -> str | None:
    """What a custom call calls; None for another operation."""
    if operation.operation.name != "stablehlo.custom_call":
        return None
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _own_constant(operation: ir.Operation, value: ir.Value) -> ir.Value:
    """The same constant as a marked value that is equal to no other."""
    kind = ir.RankedTensorType(operation.results[0].type)
    own = ir.RankedTensorType.get(_OWN_SHAPE, kind.element_type)
    splat = ir.DenseElementsAttr.get_splat(own, value.get_splat_value())
    with ir.InsertionPoint(operation):
        constant = ir.Operation.create("stablehlo.constant", [own], attributes={"value": splat})
        marked = ir.Operation.create(
            "stablehlo.custom_call",
            [own],
            constant.results,
            {
                "call_target_name": ir.StringAttr.get("Sharding"),
                SHARDING: ir.StringAttr.get("{manual}"),
            },
        )
        scalar = ir.RankedTensorType.get((), kind.element_type)
        reshaped = ir.Operation.create("stablehlo.reshape", [scalar], marked.results)
        if not kind.rank:
            return reshaped.results[0]
        none = ir.DenseI64ArrayAttr.get([])
        dimensions = {"broadcast_dimensions": none}
        shaped = ir.Operation.create(
            "stablehlo.broadcast_in_dim", [kind], reshaped.results, dimensions
        )
        return shaped.results[0]
