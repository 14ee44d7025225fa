"""Finds calls of kept functions that XLA may have compiled wrongly, in the HLO of a compiled program.

jaxlib 0.10.2 (CPU) lets a fusion write its result in place of a parameter of which it reads only the
element that it writes. When a call gives the same value for two parameters, and a fusion of the function
reads the other one elsewhere, it reads what it has overwritten. Lowering gives no value twice, and no
value two names, but XLA may find out that two are the same.
"""

from __future__ import annotations

import re
from typing import Final

from xla_core.lowering.outline import KEPT_PREFIX

_HEAD: Final = f"%{KEPT_PREFIX}"
_CALL: Final = re.compile(rf" call\((.*)\), to_apply=%({KEPT_PREFIX}[^\s,]*)")
_NAME: Final = re.compile(r"%[^\s,()]+")


def clashes(hlo: str) -> bool:
    """Whether a call gives one value for two parameters that one instruction of the function reads.

    Also whether a function returns a value twice or a parameter as it is, which gives it two names.
    """
    bodies, calls = _read(hlo)
    if any(map(_returns_twice, bodies.values())):
        return True
    for operands, name in calls:
        repeated = len(set(operands)) < len(operands)
        if repeated and (name not in bodies or _read_together(bodies[name], operands)):
            return True
    return False


def _read(hlo: str) -> tuple[dict[str, list[str]], list[tuple[list[str], str]]]:
    """The lines of the kept functions by name, and all calls of them: their operands and the name."""
    bodies: dict[str, list[str]] = {}
    calls: list[tuple[list[str], str]] = []
    body: list[str] = []  # of the computation that the line is in, if it is kept or not
    for line in hlo.splitlines():
        if line.startswith(_HEAD):
            body = bodies[line[1 : line.index(" ")]] = []
        elif line.startswith("}"):
            body = []
        else:
            body.append(line)
        call = _CALL.search(line) if " call(" in line else None
        if call is not None:
            calls.append((_NAME.findall(call[1]), call[2]))
    return bodies, calls


def _parameters(body: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in body:
        left, marked, right = line.partition(" parameter(")
        if marked:
            found[left.split()[0]] = int(right[: right.index(")")])
    return found


def _returns_twice(body: list[str]) -> bool:
    root = next((line for line in body if line.lstrip().startswith("ROOT ")), "")
    if " parameter(" in root:
        return True
    _, is_tuple, listed = root.partition(" tuple(")
    returned = _NAME.findall(listed[: listed.index(")")]) if is_tuple else []
    return len(set(returned)) < len(returned) or not _parameters(body).keys().isdisjoint(returned)


def _read_together(body: list[str], operands: list[str]) -> bool:
    given = {name: operands[number] for name, number in _parameters(body).items()}
    for line in body:
        read = {name for name in _NAME.findall(line.partition(" = ")[2]) if name in given}
        if len({given[name] for name in read}) < len(read):
            return True
    return False
