"""Regions of manual sharding as Shardy has them: one operation with what is computed on parts inside.

A traced program only marks where parts of a value come from, and where parts make up a value again. Operations that
are connected by parts are a region. It becomes one operation if parts do not leave it, as results of the program or
into a function or loop with marks of its own, and if nothing that it takes depends on what it gives.
"""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Collection, Iterator
from typing import Final, Protocol

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits modules.
from jaxlib.mlir import ir

# jaxlib 0.10.2: builders of Shardy's operations.
from jaxlib.mlir.dialects import sdy

from xla_core.jax_bridge.module_attributes import all_operations
from xla_core.jax_bridge.passes.manual_constants import (
    BEGINS,
    ENDS,
    SHARDING,
    call_target,
    called_function,
)

_REPLICATED: Final = "{replicated}"
_MARKS: Final = (BEGINS, ENDS)
# Operations that are computed again in a region that uses them; those on them alone, too.
_CONSTANTS: Final = ("stablehlo.constant", "stablehlo.iota")
_NOT_PURE: Final = ("stablehlo.custom_call", "func.call")


class Mesh(Protocol):
    """Named axes over which a program's values are split."""

    @property
    def names(self) -> tuple[str, ...]:
        """The axes."""

    def translate(self, text: str, rank: int) -> str:
        """Shardy's text for the HLO sharding ``text`` of a value with ``rank`` dimensions."""

    def parts(self, text: str, rank: int) -> tuple[int, ...]:
        """The number of parts along each dimension that the HLO sharding ``text`` makes."""


def outline(module: ir.Module, mesh: Mesh) -> bool:
    """Make an operation of each region. If one cannot be, the module stays as it is, and the answer is False."""
    functions = {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    blocks = [block for f in functions.values() for block in _blocks(f) if _has_marks(block)]
    if not blocks:
        return True
    marked = _functions_with_marks(functions)
    with module.context, ir.Location.unknown():
        every = [_Regions(block, mesh, marked) for block in blocks]
        if not all(regions.are_closed() for regions in every):
            return False
        for regions in every:
            regions.build()
    return True


def _blocks(operation: ir.Operation) -> Iterator[ir.Block]:
    """The blocks inside an operation, at any depth."""
    for region in operation.operation.regions:
        for block in region.blocks:
            yield block
            for inner in block.operations:
                yield from _blocks(inner)


def _has_marks(block: ir.Block) -> bool:
    return any(call_target(operation) in _MARKS for operation in block.operations)


def _functions_with_marks(functions: dict[str, ir.Operation]) -> set[str]:
    """The names of the functions that have marks, or call one that has."""
    callers: dict[str, set[str]] = {}
    marked = []
    for name, function in functions.items():
        inner = list(all_operations(function.regions[0].blocks[0]))
        if any(call_target(operation) in _MARKS for operation in inner):
            marked.append(name)
        for callee in map(called_function, inner):
            callers.setdefault(callee, set()).add(name)
    reached: set[str] = set()
    while marked:
        name = marked.pop()
        if name not in reached:
            reached.add(name)
            marked += callers.get(name, ())
    return reached


def _key(operation: ir.Operation) -> int:
    # each look at an operation is another Python object; their hash is the operation's
    return hash(operation.operation)


_Use = tuple[ir.Operation, int, ir.Value]


def _uses(operation: ir.Operation) -> list[_Use]:
    """What an operation, and those inside it, take from outside: the taker, the operand's number, the value."""
    inner = _inner(operation)
    everyone = [operation.operation, *inner]
    uses = [(o, i, value) for o in everyone for i, value in enumerate(o.operands)]
    if not inner:
        return uses
    owners = {*map(_key, inner), *map(hash, _blocks(operation))}
    return [use for use in uses if _owner(use[2]) not in owners]


def _owner(value: ir.Value) -> int:
    """The hash of the operation that gives a value, or of the block whose argument it is."""
    owner = value.owner
    return hash(owner) if isinstance(owner, ir.Block) else _key(owner)


class _Regions:
    """The regions of one block: which operations they consist of, and what each takes and gives."""

    def __init__(self, block: ir.Block, mesh: Mesh, marked: Collection[str]) -> None:
        self.mesh, self.marked = mesh, marked
        self.operations = [o.operation for o in block.operations]
        self.uses = [_uses(o) for o in self.operations]
        self.targets = [call_target(o) for o in self.operations]
        self.places = {_key(o): place for place, o in enumerate(self.operations)}
        self.sources = [
            [
                self.places[owner]
                for owner in {_owner(v) for _, _, v in uses}
                if owner in self.places
            ]
            for uses in self.uses
        ]
        # for an operation on parts, another one of its region, at last the region's first one
        self.first: dict[int, int] = {}
        self.constants: set[int] = set()
        for place in range(len(self.operations)):
            self._sort_in(place)
        self.regions: dict[int, list[int]] = {}
        for place in sorted(self.first):
            self.regions.setdefault(self._region(place), []).append(place)

    def _sort_in(self, place: int) -> None:
        """Find out whether an operation is constant or on parts, and which regions it connects."""
        operation, sources = self.operations[place], self.sources[place]
        if self.targets[place] == BEGINS:
            return
        joined = [s for s in sources if s in self.first and self.targets[s] != ENDS]
        if joined or self.targets[place] == ENDS or any(self.targets[s] == BEGINS for s in sources):
            self.first[place] = place
            for source in joined:
                a, b = self._region(source), self._region(place)
                self.first[max(a, b)] = min(a, b)
        elif operation.name in _CONSTANTS or (
            sources
            and not operation.regions
            and operation.name not in _NOT_PURE
            and len(sources) == len({_owner(v) for _, _, v in self.uses[place]})
            and self.constants.issuperset(sources)
        ):
            self.constants.add(place)

    def _region(self, place: int) -> int:
        """The first operation of the region that an operation is in."""
        while self.first[place] != place:
            place = self.first[place]
        return place

    def are_closed(self) -> bool:
        """Whether each region can be an operation."""
        for place in self.first:
            operation = self.operations[place]
            if place == len(self.operations) - 1 or called_function(operation) in self.marked:
                return False
            if any(map(_has_marks, _blocks(operation))):
                return False
        marks = [p for p, target in enumerate(self.targets) if target in _MARKS]
        return all(map(self._is_even, marks)) and self._are_in_order()

    def _is_even(self, place: int) -> bool:
        """Whether a mark's parts are equal and make up the whole value."""
        operation, begins = self.operations[place], self.targets[place] == BEGINS
        taken, given = (
            ir.RankedTensorType(v.type).shape for v in (operation.operands[0], operation.results[0])
        )
        whole, part = (taken, given) if begins else (given, taken)
        text = self._whole_sharding(place)
        if text is None:
            return False
        parts = self.mesh.parts(text, len(whole))
        return [n * m for n, m in zip(part, parts, strict=True)] == list(whole)

    def _whole_sharding(self, place: int) -> str | None:
        """The HLO sharding of the whole value of a mark; where parts come from, its annotation has it."""
        operation = self.operations[place]
        if self.targets[place] == BEGINS:
            operation = operation.operands[0].owner
            if isinstance(operation, ir.Block) or call_target(operation) != "Sharding":
                return None
        return str(ir.StringAttr(operation.attributes[SHARDING]).value)

    def _are_in_order(self) -> bool:
        """Whether what regions take does not depend on what they give, directly or through other regions."""
        numbers = {region: 1 << i for i, region in enumerate(self.regions)}
        behind = [0] * len(self.operations)  # the regions that a value depends on, as bits
        needs = dict.fromkeys(self.regions, 0)
        for place, sources in enumerate(self.sources):
            if place not in self.first:
                for source in sources:
                    behind[place] |= behind[source]
                continue
            region = self._region(place)
            for source in sources:
                if source not in self.first or self.targets[source] == ENDS:
                    needs[region] |= behind[source]
            if self.targets[place] == ENDS:
                behind[place] = numbers[region]
        graph = {r: [q for q, bit in numbers.items() if need & bit] for r, need in needs.items()}
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError:
            return False
        return True

    # -- building ------------------------------------------------------------------------------

    def build(self) -> None:
        """Put each region into an operation, behind all that it takes and before all that uses it."""
        end = self.operations[-1]
        for place in self._order():
            if place in self.first:
                with ir.InsertionPoint(end):
                    self._make(self.regions[place])
            elif place != len(self.operations) - 1:
                self.operations[place].move_before(end)
        for operation, target in zip(self.operations, self.targets, strict=True):
            if target == BEGINS:
                operation.erase()

    def _order(self) -> Iterator[int]:
        """Operations outside of regions, and first ones of regions, each behind what it needs."""
        nodes = [self._region(p) if p in self.first else p for p in range(len(self.operations))]
        # that of a region is the place of its last operation
        rank = {node: place for place, node in enumerate(nodes)}
        users: dict[int, set[int]] = {node: set() for node in rank}
        for node, sources in zip(nodes, self.sources, strict=True):
            for source in sources:
                if nodes[source] != node:
                    users[nodes[source]].add(node)
        missing = dict.fromkeys(rank, 0)
        for waiting in users.values():
            for node in waiting:
                missing[node] += 1
        ready = [(rank[node], node) for node, count in missing.items() if not count]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)[1]
            yield node
            for user in users[node]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (rank[user], user))

    def _make(self, places: list[int]) -> None:
        """The operation of one region."""
        inside = {_key(self.operations[p]) for p in places if self.targets[p] != ENDS}
        ends = [p for p in places if self.targets[p] == ENDS]
        taken: dict[tuple[int, int], tuple[ir.Value, str, ir.Type]] = {}
        rewired: list[tuple[ir.Operation, int, tuple[int, int]]] = []
        copied: list[_Use] = []
        for place in places:
            for user, number, value in self.uses[place]:
                source = self.places.get(_owner(value))
                if _owner(value) in inside:
                    continue
                if source in self.constants:
                    copied.append((user, number, value))
                    continue
                key = (_owner(value), _number(value))
                taken.setdefault(key, self._operand(value, source))
                rewired.append((user, number, key))
        results = [self.operations[p].results[0] for p in ends]
        operation = sdy.ManualComputationOp(
            [result.type for result in results],
            [value for value, _, _ in taken.values()],
            self._shardings([(value, text) for value, text, _ in taken.values()]),
            self._shardings([(r, self._text(p)) for r, p in zip(results, ends, strict=True)]),
            sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in self.mesh.names]),
        )
        block = ir.Block.create_at_start(operation.body, [kind for _, _, kind in taken.values()])
        arguments = dict(zip(taken, block.arguments, strict=True))
        for user, number, key in rewired:
            user.operands[number] = arguments[key]
        self._copy_constants(copied, block)
        for place in places:
            if self.targets[place] != ENDS:
                block.append(self.operations[place])
                for inner in [self.operations[place], *_inner(self.operations[place])]:
                    if SHARDING in inner.attributes and call_target(inner) is None:
                        del inner.attributes[SHARDING]
        with ir.InsertionPoint(block):
            sdy.ReturnOp([self.operations[p].operands[0] for p in ends])
        for place, result, given in zip(ends, results, operation.results, strict=True):
            result.replace_all_uses_with(given)
            self.operations[place].erase()

    def _text(self, place: int) -> str:
        text = self._whole_sharding(place)
        assert text is not None  # are_closed() has looked
        return text

    def _operand(self, value: ir.Value, source: int | None) -> tuple[ir.Value, str, ir.Type]:
        """What the region takes for a value, how it is split, and the type inside: a part, or all of it."""
        if source is not None and self.targets[source] == BEGINS:
            annotated = self.operations[source].operands[0]
            return annotated.owner.operands[0], self._text(source), value.type
        return value, _REPLICATED, value.type

    def _shardings(self, values: list[tuple[ir.Value, str]]) -> ir.Attribute:
        return sdy.TensorShardingPerValueAttr.get(
            [
                ir.Attribute.parse(self.mesh.translate(text, ir.RankedTensorType(value.type).rank))
                for value, text in values
            ]
        )

    def _copy_constants(self, uses: list[_Use], block: ir.Block) -> None:
        """Compute in the region's block what is constant."""
        copies: dict[int, ir.Operation] = {}

        def copy(operation: ir.Operation) -> ir.Operation:
            key = _key(operation)
            if key not in copies:
                for operand in operation.operands:
                    copy(operand.owner)
                with ir.InsertionPoint(block):
                    copies[key] = operation.operation.clone()
                for user, number, value in _uses(copies[key]):
                    user.operands[number] = copies[_owner(value)].results[_number(value)]
            return copies[key]

        for user, number, value in uses:
            user.operands[number] = copy(value.owner).results[_number(value)]


def _number(value: ir.Value) -> int:
    """Which result of its operation, or argument of its block, a value is."""
    if isinstance(value.owner, ir.Block):
        return int(ir.BlockArgument(value).arg_number)
    return int(ir.OpResult(value).result_number)


def _inner(operation: ir.Operation) -> list[ir.Operation]:
    return [o for region in operation.regions for b in region.blocks for o in all_operations(b)]
