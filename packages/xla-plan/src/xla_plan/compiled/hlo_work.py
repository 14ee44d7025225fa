"""Counts the work of one run of a compiled module on one chip: FLOPs, cycles and HBM bytes, with loops."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator
from typing import Final

from xla_plan.compiled.hlo_module import KINDS, Array, Computation, Instruction, Module, arrays_in

_FREE: Final = frozenset({
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "while",
    "call", "conditional", "after-all", "opt-barrier", "copy-done", "slice-done", "async-done",
    "async-update", "all-gather-done", "all-reduce-done", "collective-permute-done", "reduce-scatter-done",
})  # fmt: skip
"""Instructions that move no data themselves; the work that they stand for is counted elsewhere."""
_PIECES: Final = ("async-collective-start", "async-collective-done")
"""Names of fusions that begin and end a collective which runs in pieces."""
_ALIAS: Final = re.compile(r"\{(?P<result>\d*)\}: \((?P<operand>\d+), \{\}\)")
KERNEL: Final = "tpu_custom_call"
"""The target of kernels written for the chip (Pallas), whose cycles the compiler does not estimate."""
_SPATIAL: Final = re.compile(r"^(?P<left>\w+)_(?P<right>\w+)->(?P<result>\w+)$")
_SAME: Final = ("copy", "bitcast", "bitcast-convert", "copy-start", "copy-done", "convert")
"""Instructions whose value is that of their operand."""
_MOST_STEPS: Final = 12
"""The number of instructions that are followed back to find a constant of a loop's counter."""


@dataclasses.dataclass
class Work:
    """The work of one run on one chip.

    ``flops`` are those of products outside of kernels. The bodies of the ``unknown_loops``, whose number of passes
    is unknown, are counted once.
    """

    flops: float = 0.0
    kernel_flops: float = 0.0
    kernel_bytes: float = 0.0
    cycles: float = 0.0
    hbm_bytes: float = 0.0
    unknown_loops: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """An instruction of the computation ``where``, which runs ``times`` times in one run of the module."""

    instruction: Instruction
    where: Computation
    times: int


def walk(module: Module) -> Iterator[Visit]:
    """All instructions of the entry computation, and of loops, calls and conditions with their number of passes."""
    waiting: list[tuple[str, int]] = [(module.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        computation = module.computations[name]
        for one in computation.values():
            yield Visit(one, computation, times)
            if one.opcode == "while":
                body = (one.attribute("body") or "").lstrip("%")
                if body in module.computations:
                    waiting.append((body, times * (passes(module, one, computation) or 1)))
            elif one.opcode == "call":
                waiting += [(c, times) for c in one.called if c in module.computations]
            elif one.opcode == "conditional":
                # it is not known which branch runs, so the first one is counted
                branches = re.findall(
                    r"(?:branch_computations=\{|true_computation=)%([\w.-]+)", one.rest
                )
                waiting += [(c, times) for c in branches[:1] if c in module.computations]


def work(module: Module) -> Work:
    """The work of one run, with that of loops."""
    total = Work()
    fused = _FusedFlops(module)
    hbm = _HbmBytes(module)
    for visit in walk(module):
        one, times = visit.instruction, visit.times
        total.hbm_bytes += times * hbm.of(one, visit.where)
        if one.opcode == "while" and passes(module, one, visit.where) is None:
            total.unknown_loops += 1
        if one.opcode in _FREE or one.name.startswith(_PIECES):
            continue
        if f'custom_call_target="{KERNEL}"' in one.rest:
            total.kernel_flops += times * (one.number("flops") or 0)
            total.kernel_bytes += times * (one.number("bytes_accessed") or 0)
        total.cycles += times * (one.number("estimated_cycles") or 0)
        total.flops += times * fused.of(one, visit.where)
    return total


class _HbmBytes:
    """Counts the bytes that instructions read from and write to HBM.

    A collective that the compiler has cut into pieces runs inside of fusions, beside products. Each of these
    hands on the collective's buffers, whole ones; they count once.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._seen: set[tuple[str, str | None]] = set()
        self._homes = {
            one.name: computation
            for computation in module.computations.values()
            for one in computation.values()
            if one.opcode in KINDS
        }

    def of(self, one: Instruction, where: Computation) -> int:
        """The bytes of one instruction, with those of a collective whose first piece it is."""
        inside = self._module.collectives_in(one) if one.opcode == "fusion" else ()
        pieces = [piece for piece, _ in inside if piece.name in self._homes]
        count = 0
        for piece in pieces:
            key = piece.opcode, piece.attribute("channel_id")
            if key not in self._seen:
                self._seen.add(key)
                count += _hbm_bytes(piece, self._homes[piece.name])
        if one.opcode in _FREE or one.name.startswith(_PIECES):
            return count
        same = one.attribute("output_to_operand_aliasing") if pieces else None
        pairs = list(_ALIAS.finditer(same or ""))
        operands = {int(m["operand"]) for m in pairs}
        return count + _hbm_bytes(one, where, operands, {int(m["result"] or 0) for m in pairs})


def _hbm_bytes(
    one: Instruction,
    where: Computation,
    handed_on: Collection[int] = (),
    given_back: Collection[int] = (),
) -> int:
    """The bytes that an instruction reads from and writes to HBM; the chip's own memory does not count.

    The start of a slice or copy reads as much as it writes, even from a larger operand. Operands at the positions
    ``handed_on`` and results at ``given_back`` are not counted.
    """
    if one.opcode in ("slice-start", "copy-start", "async-start") or one.opcode == "dynamic-slice":
        moved = [a for a in one.arrays if a.elements]
        # the results begin with the operands, then comes the array that is written, then flags
        part = min((a.bytes for a in moved[:2]), default=0)
        return part * sum(not a.on_chip for a in moved[:2])
    read: dict[str, int] = {}
    for position, name in enumerate(one.operands):
        source = where.get(name)
        if source is None or source.opcode in ("constant", "partition-id") or position in handed_on:
            continue
        read[name] = sum(a.bytes for a in source.arrays if not a.on_chip)
    written = (a for n, a in enumerate(one.arrays) if n not in given_back and not a.on_chip)
    return sum(read.values()) + sum(a.bytes for a in written)


class _FusedFlops:
    """Counts multiplications and additions of products, also inside fusions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, float] = {}

    def of(self, one: Instruction, where: Computation) -> float:
        """The FLOPs of one instruction, with those of the computations that it calls."""
        if one.opcode == "convolution":
            return _convolution(one, where)
        if one.opcode == "dot":
            return _dot(one, where)
        if one.opcode in ("fusion", "async-start"):
            return sum(map(self._computation, one.called))
        return 0.0

    def _computation(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = 0.0
            inner = self._module.computations.get(name, {})
            self._known[name] = sum(self.of(one, inner) for one in inner.values())
        return self._known[name]


def _operand(one: Instruction, position: int, where: Computation) -> Array | None:
    # in the long form of the text, operands follow their types
    written = list(arrays_in(one.arguments))
    if len(written) == len(one.operands):
        return written[position]
    source = where.get(one.operands[position])
    return source.arrays[0] if source is not None and len(source.arrays) == 1 else None


def _dot(one: Instruction, where: Computation) -> float:
    left = _operand(one, 0, where)
    numbers = re.findall(r"\d+", one.attribute("lhs_contracting_dims") or "")
    if left is None:
        return 0.0
    return 2.0 * one.arrays[0].elements * math.prod(left.sizes[int(n)] for n in numbers)


def _convolution(one: Instruction, where: Computation) -> float:
    """The FLOPs of a convolution without its padding; a TPU's matrix products are convolutions, too."""
    left, right = (_operand(one, n, where) for n in (0, 1))
    labels = _SPATIAL.match(one.attribute("dim_labels") or "")
    if left is None or right is None or labels is None:
        return 0.0
    inputs = right.sizes[labels["right"].index("i")]
    result = one.arrays[0]
    size = result.sizes[labels["result"].index("b")] * result.sizes[labels["result"].index("f")]
    windows = _windows(one.attribute("window") or "")
    spatial = sorted(c for c in labels["left"] if c.isdigit())
    for number, name in enumerate(spatial):
        window = {key: values[number] for key, values in windows.items() if number < len(values)}
        size *= _meetings(
            left.sizes[labels["left"].index(name)],
            right.sizes[labels["right"].index(name)],
            result.sizes[labels["result"].index(name)],
            window,
        )
    groups = int(one.attribute("batch_group_count") or 1)
    return 2.0 * inputs * size / groups


def _windows(text: str) -> dict[str, list[str]]:
    pairs = (part.split("=") for part in text.strip("{}").split() if "=" in part)
    return {key: values.split("x") for key, values in pairs}


def _meetings(left: int, right: int, result: int, window: dict[str, str]) -> int:
    """The number of pairs of a result's and a kernel's position that read an element, in one dimension."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride, dilated = int(window.get("stride", "1")), int(window.get("rhs_dilate", "1"))
    spread = int(window.get("lhs_dilate", "1"))
    if (low, stride, dilated, spread) == (0, 1, 1, 1) and left == result + right - 1:
        return result * right
    count = 0
    for place in range(right):
        first = place * dilated - low
        # positions first + n * stride for n < result that are multiples of `spread` within the input
        hits = range(first, first + result * stride, stride)
        count += sum(1 for at in hits if at >= 0 and at % spread == 0 and at // spread < left)
    return count


def passes(module: Module, loop: Instruction, where: Computation) -> int | None:
    """The number of passes of a loop that counts up to a constant; None for other loops."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if noted:
        return int(noted[1])
    condition = module.computations.get((loop.attribute("condition") or "").lstrip("%"), {})
    body = module.computations.get((loop.attribute("body") or "").lstrip("%"), {})
    root = next((one for one in condition.values() if one.root), None)
    if root is not None and root.opcode == "fusion":
        condition, root = _inlined(module, root, condition)
    start = next(iter(where[n] for n in loop.operands if n in where), None)
    result = next((one for one in body.values() if one.root), None)
    if root is None or start is None or start.opcode != "tuple":
        return None
    if result is None or result.opcode != "tuple":  # such as a fusion with several results
        return None
    for index, last in _limits(condition, root):
        step = _step(body, result.operands[index], index)
        first = _constant(_followed(where, start.operands[index]))
        if first is not None and step and last > first:
            return -(-(last - first) // step)
    return None


def _limits(condition: Computation, root: Instruction) -> Iterator[tuple[int, int]]:
    """The indices of the loop's values that are compared with constants, and these constants.

    On a TPU a counter of 64 bits is two of 32 bits, and the condition compares both, joined by ``and`` and ``or``.
    """
    if root.opcode in ("and", "or"):
        for name in root.operands:
            if name in condition:
                yield from _limits(condition, condition[name])
    elif root.opcode == "compare" and root.attribute("direction") == "LT":
        counter, limit = (_followed(condition, name) for name in root.operands)
        last = _constant(limit)
        index = counter.attribute("index") if counter is not None else None
        if last is not None and index is not None:
            yield int(index), last


def _inlined(
    module: Module, root: Instruction, outer: Computation
) -> tuple[Computation, Instruction | None]:
    """A fused condition, with the operands of the fusion in place of its parameters, and its root."""
    inner = module.computations.get(next(iter(root.called), ""), {})
    merged = dict(outer)
    for one in inner.values():
        if one.opcode == "parameter" and one.arguments.isdigit():
            merged[one.name] = outer.get(root.operands[int(one.arguments)], one)
        else:
            merged[one.name] = one
    return merged, next((one for one in inner.values() if one.root), None)


def _followed(where: Computation, name: str) -> Instruction | None:
    """The instruction that computes a value, found through copies."""
    instruction = where.get(name)
    for _ in range(_MOST_STEPS):
        if instruction is None or instruction.opcode not in _SAME:
            break
        instruction = where.get(instruction.operands[0])
    return instruction


def _constant(instruction: Instruction | None) -> int | None:
    if (
        instruction is None
        or instruction.opcode != "constant"
        or not re.fullmatch(r"-?\d+", instruction.arguments)
    ):
        return None
    return int(instruction.arguments)


def _step(body: Computation, name: str, index: int) -> int | None:
    """The number that one pass adds to the counter, element ``index`` of the loop's values; None if unknown."""
    total = 0
    for _ in range(_MOST_STEPS):
        instruction = _followed(body, name)
        if instruction is None:
            return None
        if instruction.opcode == "get-tuple-element":
            return total if instruction.attribute("index") == str(index) else None
        if instruction.opcode != "add":
            return None
        sides = [(_constant(_followed(body, n)), n) for n in instruction.operands]
        added, rest = next(
            ((c, o) for (c, _), (_, o) in itertools.permutations(sides, 2) if c is not None),
            (None, ""),
        )
        if added is None:
            return None
        total, name = total + added, rest
    return None
