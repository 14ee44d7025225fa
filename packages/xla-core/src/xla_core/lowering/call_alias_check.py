"""Finds, in the HLO of a compiled program, kept functions whose calls XLA may have compiled wrongly.

jaxlib 0.10.2 (CPU) lets a fusion write its result in place of an operand of which it reads only the
element that it writes. If a call has given one value two names (two of its operands are the same, or
it returns an operand unchanged, or one result twice), and the fusion also reads the value by its
other name, it reads what it has overwritten. Lowering never makes such a call, but XLA may find that
two values are equal, or that an operation of the function changes nothing.

The text of HLO is not a stable interface: if a line is not in the form that jaxlib 0.10.2 writes, all functions
are considered unsafe.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from xla_core.lowering.outline_functions import KEPT_PREFIX

logger = logging.getLogger(__name__)

_ENTRY: Final = "ENTRY"
_INSTRUCTION: Final = re.compile(r"\s+(?:ROOT )?(%\S+) = .*? ([a-z][a-z0-9-]*)\(([^)]*)\)")
_NAME: Final = re.compile(r"%[^\s,()]+")
_INDEX: Final = re.compile(r" index=(\d+)")
_CALLEE: Final = re.compile(rf" to_apply=%({KEPT_PREFIX}[^\s,]*)")
_HEADER: Final = re.compile(r"(?:(ENTRY) )?%?(\S+) \(.*\{$")
_COMMENT: Final = re.compile(r"/\*.*?\*/")
# names in quotes are the user's, or those of operations before XLA's passes
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
# a function's name in an attribute; instructions are also named after functions
_REFERENCE: Final = re.compile(rf"[={{,] ?%?{KEPT_PREFIX}")
_CALL: Final = re.compile(r"\bcall\b")
_KEPT_NAME: Final = re.compile(rf"{KEPT_PREFIX}\w+".encode())

MSG_UNREADABLE: Final = (
    "the HLO text of a compiled program is not in the form of jaxlib 0.10.2 (%s): repeats of a step are "
    "inlined, which takes longer to compile"
)


class _UnreadableError(Exception):
    """A line has an unknown form."""


class _Held(NamedTuple):
    """The value of a name; names that XLA knows to be the same in a computation have the same ``base``."""

    value: int
    base: str
    function: (
        str  # the function that gave the value this name, as a parameter or a result; else empty
    )


def kept_functions(stablehlo: bytes) -> set[str]:
    """The names of the kept functions in a lowered program, including those that were inlined since."""
    return {name.decode() for name in _KEPT_NAME.findall(stablehlo)}


def clashes(hlo: str, kept: Collection[str]) -> set[str]:
    """The functions in ``kept`` whose calls make an instruction read one value by two names.

    ``hlo`` is the text of a compiled program, ``kept`` are the functions that its StableHLO calls. Returns all of
    them if a relevant line is not understood, or if calls are mentioned and none is understood. XLA may have
    removed all calls: of functions that compute nothing, such as ``clone``.
    """
    try:
        walk = _Walk(_computations(hlo), kept)
        walk.follow(_ENTRY, ())
        walk.check_all_visited()
    except _UnreadableError as error:
        logger.warning(MSG_UNREADABLE, error)
        return set(kept)
    return walk.unsafe


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation, by name."""
    bodies: dict[str, list[str]] = {}
    body: list[str] | None = None
    for line in hlo.splitlines():
        if not line[:1].isspace():
            header = _HEADER.match(line)
            if header is not None:
                body = bodies[header[1] or header[2]] = []
            elif _refers(line):
                raise _UnreadableError(line)
        elif body is not None and line.strip():
            body.append(line)
    if _ENTRY not in bodies:
        raise _UnreadableError("no entry computation")
    return bodies


class _Walk:
    """Follows values by number from the entry computation through the calls."""

    def __init__(self, bodies: dict[str, list[str]], kept: Collection[str]) -> None:
        self.bodies = bodies
        self.kept = kept
        self.unsafe: set[str] = set()
        self._visited: set[str] = set()
        self._numbers = itertools.count()

    def check_all_visited(self) -> None:
        """Raise _UnreadableError if a computation that calls a kept function was not visited."""
        followed = len(self._visited) > 1
        if self.kept and not followed and any(map(_mentions_call, self.bodies[_ENTRY])):
            raise _UnreadableError("no call is found")
        for name in self.bodies.keys() - self._visited:
            if any(map(_refers, self.bodies[name])):
                raise _UnreadableError(f"{name} calls a function and is not called itself")

    def follow(self, name: str, arguments: Sequence[int]) -> list[int]:
        """The values that a computation returns for these arguments."""
        self._visited.add(name)
        function = name.partition(".")[0] if name != _ENTRY else ""
        held: dict[str, _Held] = {}
        tuples: dict[str, dict[int, _Held]] = {}
        returned: list[int] | None = None
        parameters = 0
        for line in self.bodies[name]:
            target, opcode, listed = _instruction(line)
            operands = [] if opcode in _LITERAL else _operands(line, listed, held)
            result = None
            if opcode == "parameter":
                parameters += 1
                if function:
                    result = _Held(_argument(line, listed, arguments), target, function)
            elif opcode == "bitcast":
                (result,) = operands
            elif opcode == "tuple":
                tuples[target] = dict(enumerate(operands))
            elif opcode == "get-tuple-element":
                result = _element(line, tuples.setdefault(listed.strip(), {}))
            elif _refers(line):
                tuples[target] = self._call(_QUOTED.sub("", line), opcode, target, operands)
                result = tuples[target].get(0)  # the result, unless it is a tuple
            else:
                self._check(operands)
            held[target] = result or _Held(next(self._numbers), target, "")
            if line.lstrip().startswith("ROOT "):
                returned = [h.value for h in tuples.get(target, {0: held[target]}).values()]
        if returned is None or (function and parameters != len(arguments)):
            raise _UnreadableError(f"{name} has no result, or not its {len(arguments)} parameters")
        return returned

    def _call(
        self, line: str, opcode: str, target: str, operands: Sequence[_Held]
    ) -> dict[int, _Held]:
        """The elements of a call's result."""
        callee = _CALLEE.search(line)
        if opcode != "call" or callee is None or callee[1] not in self.bodies:
            raise _UnreadableError(line)
        inner = callee[1].partition(".")[0]
        if inner not in self.kept:
            raise _UnreadableError(f"{inner} is not one of the program's functions")
        results = self.follow(callee[1], [o.value for o in operands])
        return {i: _Held(value, f"{target} {i}", inner) for i, value in enumerate(results)}

    def _check(self, operands: Iterable[_Held]) -> None:
        by_value: dict[int, dict[str, _Held]] = {}
        for operand in operands:
            by_value.setdefault(operand.value, {})[operand.base] = operand
        for same in by_value.values():
            if len(same) > 1:
                self.unsafe.update(h.function for h in same.values() if h.function)


# The parentheses of these instructions contain no operands.
_LITERAL: Final = frozenset({"parameter", "constant"})


def _mentions_call(line: str) -> bool:
    return _CALL.search(_QUOTED.sub("", line)) is not None


def _refers(line: str) -> bool:
    """Whether a line names a kept function in one of its attributes."""
    return KEPT_PREFIX in line and _REFERENCE.search(_QUOTED.sub("", line)) is not None


def _instruction(line: str) -> tuple[str, str, str]:
    """An instruction's name, opcode and the text in its parentheses."""
    match = _INSTRUCTION.match(line)
    if match is None:
        raise _UnreadableError(line)
    target, opcode, listed = match.groups()
    return target, opcode, listed


def _operands(line: str, listed: str, held: dict[str, _Held]) -> list[_Held]:
    """The operands of an instruction, all of which earlier lines have defined."""
    names = _NAME.findall(listed)
    count = len(_COMMENT.sub("", listed).split(",")) if listed.strip() else 0
    if len(names) < count or any(name not in held for name in names):
        raise _UnreadableError(line)
    return [held[name] for name in names]


def _argument(line: str, listed: str, arguments: Sequence[int]) -> int:
    if not listed.isdecimal() or int(listed) >= len(arguments):
        raise _UnreadableError(line)
    return arguments[int(listed)]


def _element(line: str, elements: dict[int, _Held]) -> _Held | None:
    index = _INDEX.search(line)
    if index is None:
        raise _UnreadableError(line)
    return elements.get(int(index[1]))
