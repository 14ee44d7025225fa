"""Makes ``stablehlo.composite`` operations of the marks that ``custom_call_primitives.mark`` leaves in a module.

A composite holds what its results need and what is computed from its operands; values from outside that
it reads become further operands, constants are computed inside. Inner composites come first, so that
outer ones hold them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

# jaxlib 0.10.2: MLIR bindings
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func as _func

from xla_core.jax_bridge.custom_call_primitives import MARK_TARGET, Mark
from xla_core.jax_bridge.jax_private import stablehlo

_SHAPING: Final = frozenset(
    f"stablehlo.{name}" for name in ("broadcast_in_dim", "convert", "reshape", "transpose")
)

# Constants that take longer to compute are operands.
_MOST_STEPS: Final = 32

MSG_ENTANGLED: Final = (
    "the composites {names} cannot be separated: each holds a mark of another one. Mark the results of one "
    "before the operands of the next, or one wholly inside the other"
)
MSG_ORDER: Final = (
    "the composite {name!r} has a result that was marked before its last operand was computed; mark "
    "all operands, then all results"
)


def build_composites(module: ir.Module) -> None:
    """Turn marks into composites; marks of instances without both ends in one block are removed.

    Raises ValueError for composites that overlap without one being inside the other.
    """
    table = ir.SymbolTable(module.operation)
    with module.context, ir.Location.unknown():
        for function in list(module.body.operations):
            if function.operation.name == "func.func" and function.regions[0].blocks:
                _build_in(function.regions[0].blocks[0], module, table)
        _remove_marks(module)


def _build_in(block: ir.Block, module: ir.Module, table: ir.SymbolTable) -> None:
    waiting = _instances(block)
    while waiting:
        for instance in waiting:
            body = instance.body()
            # an inner composite comes first: the one around it then holds it as an operation
            if all(_mark_of(op) is None for op in body):
                break
        else:
            names = ", ".join(repr(i.name) for i in waiting)
            raise ValueError(MSG_ENTANGLED.format(names=names))
        waiting.remove(instance)
        _build(instance, body, module, table)


@dataclasses.dataclass(slots=True, eq=False)
class _Instance:
    """The marks of one composite in one block, by position."""

    name: str
    inputs: list[tuple[Mark, ir.Value]]
    outputs: list[tuple[Mark, ir.Value]]

    def body(self) -> list[ir.Operation]:
        """The operations between the marks, in the block's order.

        Those are computed from the operands and needed for the results; with them come the constants
        that they read, and what only spreads or casts a value for them.
        """
        starts = [op.result for _, op in self.inputs]
        ends = [op for _, op in self.outputs]
        after = _readers(starts, ends)
        inside = _ancestors([op.operands[0] for op in ends], after)
        known: dict[ir.Value, bool] = {}
        around = ends[0].parent.operation
        waiting = list(inside)
        while waiting:
            for value in _values_read(waiting.pop()):
                owner = value.owner
                if value in starts or isinstance(owner, ir.Block) or owner in inside:
                    continue
                if owner.parent.operation == around and _comes_along(owner, inside, known):
                    inside.add(owner)
                    waiting.append(owner)
        return sorted(inside, key=functools.cmp_to_key(_by_place))


def _instances(block: ir.Block) -> list[_Instance]:
    by_name: dict[tuple[str, str], _Instance] = {}
    for op in block.operations:
        mark = _mark_of(op.operation)
        if mark is not None:
            instance = by_name.setdefault((mark.name, mark.id), _Instance(mark.name, [], []))
            (instance.inputs if mark.is_input else instance.outputs).append((mark, op.operation))
    for instance in by_name.values():
        instance.inputs.sort(key=lambda pair: pair[0].position)
        instance.outputs.sort(key=lambda pair: pair[0].position)
    return [i for i in by_name.values() if i.inputs and i.outputs]


def _mark_of(op: ir.Operation) -> Mark | None:
    if op.name != "stablehlo.custom_call":
        return None
    if ir.StringAttr(op.attributes["call_target_name"]).value != MARK_TARGET:
        return None
    return Mark(**json.loads(ir.StringAttr(op.attributes["backend_config"]).value))


def _nested(op: ir.Operation) -> Iterator[ir.Operation]:
    """An operation and all inside its regions."""
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _nested(inner.operation)


def _values_read(op: ir.Operation) -> Iterator[ir.Value]:
    for inner in _nested(op):
        yield from inner.operands


def _readers(starts: Sequence[ir.Operation], ends: Sequence[ir.Operation]) -> set[ir.Operation]:
    """The operations of the block that read ``starts``, at first or second hand, before ``ends``."""
    readers: set[ir.Operation] = set()
    around = ends[0].parent.operation
    waiting = list(starts)
    while waiting:
        for use in waiting.pop().uses:
            owner = use.owner.operation
            while owner.parent.operation != around:  # inside of an operation with regions
                owner = owner.parent.operation
            if owner not in readers and owner not in ends and _before_any(owner, ends):
                readers.add(owner)
                waiting += owner.results
    return readers


def _before_any(op: ir.Operation, ends: Sequence[ir.Operation]) -> bool:
    return any(op.is_before_in_block(end) for end in ends)


def _ancestors(values: Iterable[ir.Value], among: set[ir.Operation]) -> set[ir.Operation]:
    """Those of the operations ``among`` that ``values`` are computed by."""
    ancestors: set[ir.Operation] = set()
    waiting = list(values)
    while waiting:
        owner = waiting.pop().owner
        if owner in among and owner not in ancestors:
            ancestors.add(owner)
            waiting += _values_read(owner)
    return ancestors


def _comes_along(op: ir.Operation, inside: set[ir.Operation], known: dict[ir.Value, bool]) -> bool:
    if _is_constant(op, known, _MOST_STEPS):
        return True
    return op.name in _SHAPING and all(use.owner.operation in inside for use in op.result.uses)


def _is_constant(op: ir.Operation, known: dict[ir.Value, bool], steps: int) -> bool:
    """Whether an operation depends on nothing at all, as is seen within some steps."""
    if op not in known:
        inner = set(_nested(op))
        outer = (value.owner for value in _values_read(op) if not _is_inside(value, inner))
        known[op] = _mark_of(op) is None and all(
            steps > 0 and not isinstance(owner, ir.Block) and _is_constant(owner, known, steps - 1)
            for owner in outer
        )
    return known[op]


def _by_place(left: ir.Value, right: ir.Value) -> int:
    if left == right:
        return 0
    return -1 if left.is_before_in_block(right) else 1


def _is_inside(value: ir.Value, operations: set[ir.Operation]) -> bool:
    """Whether a value is made by one of ``operations``, or is an argument of their blocks."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return owner.owner.operation in operations
    return owner in operations


def _build(
    instance: _Instance, body: Sequence[ir.Operation], module: ir.Module, table: ir.SymbolTable
) -> None:
    starts = [op.result for _, op in instance.inputs]
    captured = _captured(body, starts)
    results = [op.operands[0] for _, op in instance.outputs]
    operands = [op.operands[0] for _, op in instance.inputs] + captured
    decomposition = _function(instance.name, body, starts + captured, results, module, table)
    before = instance.outputs[0][1]
    if not all(
        isinstance(v.owner, ir.Block) or v.owner.is_before_in_block(before) for v in operands
    ):
        raise ValueError(MSG_ORDER.format(name=instance.name))
    with ir.InsertionPoint(before):
        composite = stablehlo.CompositeOp(
            [value.type for value in results],
            operands,
            name=ir.StringAttr.get(instance.name),
            decomposition=ir.FlatSymbolRefAttr.get(decomposition),
            composite_attributes=_attributes(instance.outputs[0][0]),
        )
    for (_, mark), value in zip(instance.outputs, composite.operation.results, strict=True):
        mark.result.replace_all_uses_with(value)
        mark.erase()
    for op in reversed(body):
        if all(not list(result.uses) for result in op.results):
            op.erase()


def _captured(body: Sequence[ir.Operation], starts: Sequence[ir.Operation]) -> list[ir.Value]:
    """Values from outside that the body reads, in the order of reading."""
    inside = {inner for op in body for inner in _nested(op)}
    read = {value: None for op in body for value in _values_read(op)}
    return [v for v in read if v not in starts and not _is_inside(v, inside)]


def _function(
    name: str,
    body: Sequence[ir.Operation],
    arguments: Sequence[ir.Value],
    results: Sequence[ir.Value],
    module: ir.Module,
    table: ir.SymbolTable,
) -> str:
    """Add a private function of the body's operations; its name."""
    kind = ir.FunctionType.get([a.type for a in arguments], [r.type for r in results])
    function = _func.FuncOp(f"{name}.impl", kind, ip=ir.InsertionPoint(module.body))
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    symbol = str(ir.StringAttr(table.insert(function)).value)
    entry = function.add_entry_block()
    values = dict(zip(arguments, entry.arguments, strict=True))
    with ir.InsertionPoint(entry):
        for op in body:
            copy = op.clone()
            for inner in _nested(copy):
                for i, value in enumerate(inner.operands):
                    if value in values:
                        inner.operands[i] = values[value]
            values |= dict(zip(op.results, copy.results, strict=True))
        _func.ReturnOp([values[r] for r in results])
    return symbol


def _attributes(mark: Mark) -> ir.DictAttr:
    values = json.loads(mark.attributes) or {}
    return ir.DictAttr.get({name: _attribute(value) for name, value in values.items()})


def _attribute(value: ir.Value) -> ir.Attribute:
    """As torch_xla writes them: 64-bit integers, 32-bit floats, lists as dense arrays."""
    if isinstance(value, list):
        element = _element_type(value[0])
        return ir.DenseElementsAttr.get(
            [_attribute(v) for v in value], _tensor(len(value), element)
        )
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(_element_type(value), value)
    return ir.FloatAttr.get(_element_type(value), value)


def _element_type(value: ir.Value) -> ir.Type:
    if isinstance(value, bool):
        return ir.IntegerType.get_signless(1)
    return ir.IntegerType.get_signless(64) if isinstance(value, int) else ir.F32Type.get()


def _tensor(size: int, element: ir.Type) -> ir.Type:
    return ir.RankedTensorType.get([size], element)


def _remove_marks(module: ir.Module) -> None:
    for op in [inner for inner in _nested(module.operation) if _mark_of(inner) is not None]:
        op.result.replace_all_uses_with(op.operands[0])
        op.erase()
