"""Parses the text of compiled modules into instructions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

MSG_NO_ENTRY: Final = "the text has no ENTRY computation, so it is not a compiled HLO module"

KINDS: Final = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
"""HLO's names of collective operations."""

_COMPUTATION: Final = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[^\s(]+) \(.*\{$")
_HEAD: Final = re.compile(r"^ +(?P<root>ROOT )?%(?P<name>[^\s=]+) = ")
_OPCODE: Final = re.compile(r" (?P<opcode>[a-z][\w-]*)\(")
_OPERAND: Final = re.compile(r"%([^\s,)]+)")
_ARRAY: Final = re.compile(r"(?P<type>[a-z]+\d*\w*)\[(?P<sizes>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILES: Final = re.compile(r"T\(([\d,]+)\)")
_SPACE: Final = re.compile(r"S\(\d+\)")
_BITS: Final = re.compile(r"\d+")
_FRAME: Final = re.compile(r"(?P<id>\d+) \{file_location_id=(?P<location>\d+)")
_LOCATION: Final = re.compile(r"(?P<id>\d+) \{file_name_id=(?P<file>\d+) .*?line=(?P<line>\d+)")
_FILE: Final = re.compile(r'(?P<id>\d+) "(?P<name>.*)"')


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One array in the type of an instruction; ``on_chip``: it is in another memory than HBM."""

    kind: str
    sizes: tuple[int, ...]
    on_chip: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """The size in bytes, without the padding of its layout."""
        bits = _BITS.search(self.kind)
        return math.ceil(self.elements * (int(bits[0]) if bits else 8) / 8)  # no digits: pred


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; ``rest`` is the text after the operands, which is parsed when it is needed."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    rest: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result."""
        return tuple(arrays_in(self.type))

    def attribute(self, name: str) -> str | None:
        """The text after ``name=``, up to the next comma outside of braces, or None."""
        match = re.search(
            rf"[ ,]{name}=(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|\"[^\"]*\"|[^,\s]+)", self.rest
        )
        return match[1] if match else None

    def number(self, name: str) -> int | None:
        """A number in the compiler's notes, ``"name":"12"``, or None."""
        match = re.search(rf'"{name}":"(\d+)"', self.rest)
        return int(match[1]) if match else None

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that a fusion, call, condition or asynchronous operation runs once."""
        names = re.findall(r"(?:calls|to_apply|called_computations)=\{?%([^\s,}]+)", self.rest)
        return tuple(names)


Computation = Mapping[str, Instruction]


def arrays_in(text: str) -> Iterator[Array]:
    """The arrays that a type names, in order."""
    for match in _ARRAY.finditer(text):
        sizes = tuple(int(n) for n in match["sizes"].split(",") if n)
        yield Array(match["type"], sizes, _SPACE.search(match["layout"] or "") is not None)


@dataclasses.dataclass(frozen=True)
class Module:
    """A module: its computations by name, and the lines of the user's program by stack frame."""

    name: str
    entry: str
    computations: Mapping[str, Computation]
    lines: Mapping[int, str]

    def source(self, instruction: Instruction) -> str:
        """The user's line of an instruction, ``file.py:12``, or an empty string if it is unknown."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        if match:
            return self.lines.get(int(match[1]), "")
        match = re.search(r'source_file="([^"]+)" source_line=(\d+)', instruction.rest)
        return f"{match[1].rpartition('/')[2]}:{match[2]}" if match else ""

    def collectives_in(self, one: Instruction) -> Iterator[tuple[Instruction, bool]]:
        """The collectives that an instruction is or contains, and whether computation runs beside them."""
        if one.opcode.removesuffix("-start") in KINDS:
            yield one, False
        elif one.opcode in ("fusion", "async-start"):
            for name in one.called:
                for inner in self.computations.get(name, {}).values():
                    yield from ((c, True) for c, _ in self.collectives_in(inner))


def parse(text: str) -> Module:
    """Parse the text of a module. Raises ValueError for other text."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current, section = "", None, ""
    tables: dict[str, list[str]] = {"FileNames": [], "FileLocations": [], "StackFrames": []}
    for line in text.splitlines():
        if current is None:
            started = _COMPUTATION.match(line)
            if started:
                current = computations[started["name"]] = {}
                entry = started["name"] if started["entry"] else entry
            elif line in tables:
                section = line
            elif not line.strip():
                section = ""
            elif section:
                tables[section].append(line)
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    if not entry:
        raise ValueError(MSG_NO_ENTRY)
    name = re.match(r"HloModule ([^\s,]+)", text)
    return Module(name[1] if name else "", entry, computations, _lines(tables))


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    opcode = _OPCODE.search(line, head.end() - 1)
    if opcode is None:
        return None
    end = _closing(line, opcode.end())
    arguments = line[opcode.end() : end]
    return Instruction(
        name=head["name"],
        type=line[head.end() : opcode.start()],
        opcode=opcode["opcode"],
        operands=tuple(_OPERAND.findall(arguments)),
        arguments=arguments,
        rest=line[end + 1 :],
        root=head["root"] is not None,
    )


def _closing(line: str, start: int) -> int:
    """The position of the parenthesis that closes the one before ``start``."""
    depth = 1
    for parenthesis in re.compile(r"[()]").finditer(line, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if not depth:
            return parenthesis.start()
    return len(line)


def _lines(tables: Mapping[str, list[str]]) -> dict[int, str]:
    files = {int(m["id"]): m["name"].rpartition("/")[2] for m in _rows(_FILE, tables["FileNames"])}
    locations = {
        int(m["id"]): f"{files.get(int(m['file']), '?')}:{m['line']}"
        for m in _rows(_LOCATION, tables["FileLocations"])
    }
    return {
        int(m["id"]): locations[int(m["location"])]
        for m in _rows(_FRAME, tables["StackFrames"])
        if int(m["location"]) in locations
    }


def _rows(pattern: re.Pattern[str], lines: list[str]) -> Iterator[re.Match[str]]:
    return filter(None, map(pattern.match, lines))
