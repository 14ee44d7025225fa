"""Collective operations in a compiled module: kind, size, participants, and the user's line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Final

from xla_core.contract.foreign_values import JsonObject
from xla_plan.compiled.hlo_module import Instruction, Module
from xla_plan.compiled.hlo_work import walk

_IOTA: Final = re.compile(
    r"\[(?P<groups>\d+),(?P<size>\d+)\]<=\[(?P<from>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)

_NAMED: Final = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\S+)? \{(?P<names>[^}]*)\}"
)

# libtpu 0.0.42: between slices it hands each chip's part to its multi-slice runtime, by a send to the host
_BETWEEN_SLICES: Final = re.compile(
    r'_xla_megascale_target="\{(?P<slices>[\d,:]+)\}.*?_xla_megascale_transfer_type="(?P<kind>\w+)"'
)

# Start operations whose result is a tuple of the operands, then the results; all-reduce-start returns results only.
_RETURN_OPERANDS: Final = frozenset(("all-gather-start", "collective-permute-start"))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    ``bytes`` is the size of its result on one chip, ``sent`` the bytes that one chip sends (in a ring algorithm),
    ``times`` the number of its runs in a step, ``group`` the number of chips that take part. ``crosses``: some of
    these are in another slice. ``overlapped``: it runs beside computation.
    """

    kind: str
    bytes: int
    group: int
    times: int
    line: str
    overlapped: bool
    crosses: bool = False

    @property
    def sent(self) -> float:
        """The bytes that one chip sends in one run."""
        n = self.group
        if n <= 1:
            return 0.0
        if self.kind == "collective-permute":
            return float(self.bytes)
        share = (n - 1) / n
        if self.kind == "reduce-scatter":
            return self.bytes * n * share  # the result is one of n parts
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def collectives(module: Module, chips_per_slice: int = 0) -> list[Collective]:
    """All collective operations of one run; one that the compiler cut into pieces is listed once.

    ``chips_per_slice`` is 0 (default) if there is one slice.
    """
    launched: list[Collective] = []
    seen: set[tuple[str, str]] = set()
    for visit in walk(module):
        between = _between_slices(visit.instruction)
        if between is not None:
            kind, size, count = between
            line = module.source(visit.instruction)
            launched.append(Collective(kind, size, count, visit.times, line, True, crosses=True))
        for one, beside in module.collectives_in(visit.instruction):
            kind = one.opcode.removesuffix("-start")
            channel = one.attribute("channel_id")
            if channel is not None and (kind, channel) in seen:
                continue
            if channel is not None:
                seen.add((kind, channel))
            groups = list(_groups(one))
            overlapped = beside or one.opcode.endswith("-start")
            size, crosses = _members(groups, chips_per_slice)
            line = module.source(one)
            launched.append(
                Collective(kind, _result_bytes(one), size, visit.times, line, overlapped, crosses)
            )
    return launched


def _between_slices(one: Instruction) -> tuple[str, int, int] | None:
    """The kind, the bytes of the result and the number of slices, if ``one`` sends to other slices."""
    match = _BETWEEN_SLICES.search(one.rest) if one.opcode == "send" else None
    if match is None:
        return None
    count = 0
    for part in match["slices"].split(","):
        first, _, last = part.partition(":")
        count += int(last or first) - int(first) + 1
    kind = match["kind"].lower().replace("_", "-").replace("one-to-one", "collective-permute")
    given = one.arrays[0].bytes
    result = {"all-gather": given * count, "reduce-scatter": given // count}
    return kind, result.get(kind, given), count


def _result_bytes(one: Instruction) -> int:
    sizes = [array.bytes for array in one.arrays if array.elements > 1 or len(one.arrays) == 1]
    if one.opcode in _RETURN_OPERANDS and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _groups(one: Instruction) -> Iterator[list[int]]:
    pairs = one.attribute("source_target_pairs")
    if pairs is not None:
        yield from (
            [int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)\}", pairs)
        )
        return
    named = _NAMED.search(one.rest)
    if named is not None:
        yield from _named_groups(named)
        return
    text = re.search(r"replica_groups=(\{\{.*?\}\}|\[[^\s]*?(?=,? [a-z]|, |$))", one.rest)
    if text is None:
        return
    iota = _IOTA.match(text[1])
    if iota is None:
        yield from ([int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", text[1]))
        return
    yield from _iota_groups(iota)


def _iota_groups(match: re.Match[str]) -> Iterator[list[int]]:
    """Groups written as a reshaped, transposed range: ``[groups,size]<=[from]T(order)``."""
    sizes = [int(n) for n in match["from"].split(",")]
    order = (
        [int(n) for n in match["order"].split(",")] if match["order"] else list(range(len(sizes)))
    )
    strides = [1] * len(sizes)
    for n in reversed(range(len(sizes) - 1)):
        strides[n] = strides[n + 1] * sizes[n + 1]
    numbers = [0]
    for axis in order:
        numbers = [n + k * strides[axis] for n in numbers for k in range(sizes[axis])]
    size = int(match["size"])
    yield from (numbers[n : n + size] for n in range(0, len(numbers), size))


def _named_groups(match: re.Match[str]) -> Iterator[list[int]]:
    """Groups written as axes of a mesh: ``mesh['x'=2,'y'=4] {'y'}``, the devices in their order."""
    axes = [
        (name.strip(" '"), int(size))
        for name, _, size in (a.partition("=") for a in match["axes"].split(","))
    ]
    chosen = [name.strip(" '").partition(":")[0] for name in match["names"].split(",")]
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name] = (size, stride)
        stride *= size
    starts, members = [0], [0]
    for name, (size, step) in strides.items():
        if name in chosen:
            members = [n + k * step for n in members for k in range(size)]
        else:
            starts = [n + k * step for n in starts for k in range(size)]
    yield from ([start + n for n in members] for start in starts)


def _members(groups: list[list[int]], chips_per_slice: int) -> tuple[int, bool]:
    """The size of the largest group, and whether a group has chips of several slices."""
    size = max(map(len, groups), default=1)
    if not chips_per_slice:
        return size, False
    return size, any(len({n // chips_per_slice for n in group}) > 1 for group in groups)


def by_kind(launched: Iterable[Collective]) -> list[dict[str, object]]:
    """For each kind the number of runs, the bytes of results, the bytes sent, and the user's lines."""
    rows: dict[str, JsonObject] = {}
    for one in launched:
        row = rows.setdefault(
            one.kind, {"kind": one.kind, "count": 0, "bytes": 0, "sent": 0.0, "lines": {}}
        )
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["sent"] += one.times * one.sent
        if one.line:
            row["lines"][one.line] = row["lines"].get(one.line, 0.0) + one.times * one.sent
    for row in rows.values():
        row["lines"] = dict(sorted(row["lines"].items(), key=lambda item: -item[1]))
    return sorted(rows.values(), key=lambda row: -row["sent"])
