"""Finds kept functions whose calls XLA may have compiled wrongly, in the HLO of a compiled program.

jaxlib 0.10.2 (CPU) lets a fusion write its result in place of an operand of which it reads only the
element that it writes. When a call has given one value two names (two of its operands are the same, or
it returns an operand as it is, or one result twice), and a fusion reads the value elsewhere by the
other name, it reads what it has overwritten. Lowering writes no such call, but XLA may find out that
two values are the same, or that an operation of the function changes nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from xla_core.lowering.outline import KEPT_PREFIX

_ENTRY: Final = "ENTRY"
_INSTRUCTION: Final = re.compile(r"(%\S+) = .*? ([a-z][a-z0-9-]*)\(([^)]*)\)")
_NAME: Final = re.compile(r"%[^\s,()]+")
_INDEX: Final = re.compile(r" index=(\d+)")
_CALLEE: Final = re.compile(rf" to_apply=%({KEPT_PREFIX}[^\s,]*)")


class _Held(NamedTuple):
    """What a name stands for: ``base`` is one for all that XLA knows to be the same in a computation."""

    value: int
    base: str
    function: str  # that gave the value this name: as a parameter or a result; else empty


def clashes(hlo: str) -> set[str]:
    """The kept functions, by their names in StableHLO, through which an instruction reads a value twice.

    ``hlo`` is the text of a compiled program.
    """
    walk = _Walk(_kept_bodies(hlo))
    walk.follow(_ENTRY, ())
    return walk.found


def _kept_bodies(hlo: str) -> dict[str, list[str]]:
    """The lines of the entry computation and of the kept functions' clones, by name."""
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in hlo.splitlines():
        if line.startswith("%"):
            body = []
            if line.startswith(KEPT_PREFIX, 1):
                bodies[line[1 : line.index(" ")]] = body
        elif line.startswith(_ENTRY):
            body = bodies[_ENTRY] = []
        else:
            body.append(line)
    return bodies


class _Walk:
    """Follows values by number from the entry computation through the calls."""

    def __init__(self, bodies: dict[str, list[str]]) -> None:
        self.bodies = bodies
        self.found: set[str] = set()
        self._numbers = itertools.count()

    def follow(self, name: str, arguments: Sequence[int]) -> list[int]:
        """The values that a computation returns when it is called with these."""
        function = name.partition(".")[0] if name != _ENTRY else ""
        held: dict[str, _Held] = {}
        tuples: dict[str, dict[int, _Held]] = {}
        returned: list[int] = []
        for line in self.bodies.get(name, ()):
            match = _INSTRUCTION.search(line)
            if match is None:
                continue
            target, opcode, listed = match.groups()
            operands = [held.get(n) or self._fresh(n) for n in _NAME.findall(listed)]
            callee = _CALLEE.search(line) if opcode == "call" else None
            made = None
            if opcode == "parameter" and function:
                made = _Held(arguments[int(listed)], target, function)
            elif opcode == "bitcast":
                (made,) = operands
            elif opcode == "tuple":
                tuples[target] = dict(enumerate(operands))
            elif opcode == "get-tuple-element":
                made = self._element(line, tuples.setdefault(listed, {}))
            elif callee is not None:
                results = self.follow(callee[1], [o.value for o in operands])
                inner = callee[1].partition(".")[0]
                tuples[target] = {
                    i: _Held(value, f"{target} {i}", inner) for i, value in enumerate(results)
                }
                made = tuples[target].get(0)  # where it is not a tuple
            else:
                self._check(operands)
            held[target] = made or self._fresh(target)
            if "ROOT " in line[:8]:
                returned = [h.value for h in tuples.get(target, {0: held[target]}).values()]
        return returned

    def _fresh(self, name: str) -> _Held:
        return _Held(next(self._numbers), name, "")

    def _element(self, line: str, elements: dict[int, _Held]) -> _Held | None:
        found = _INDEX.search(line)
        return None if found is None else elements.get(int(found[1]))

    def _check(self, operands: Iterable[_Held]) -> None:
        by_value: dict[int, dict[str, _Held]] = {}
        for operand in operands:
            by_value.setdefault(operand.value, {})[operand.base] = operand
        for same in by_value.values():
            if len(same) > 1:
                self.found.update(h.function for h in same.values() if h.function)
