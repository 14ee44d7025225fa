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

_CALL: Final = re.compile(rf"^.* call\((.*)\), to_apply=%({KEPT_PREFIX}[^\s,]*)", re.MULTILINE)
_PARAMETER: Final = re.compile(r"^ *(%\S+) = .* parameter\((\d+)\)", re.MULTILINE)
_ROOT: Final = re.compile(r"^ *ROOT %\S+ = .* tuple\((.*?)\)", re.MULTILINE)
_NAME: Final = re.compile(r"%[^\s,()]+")


def clashes(hlo: str) -> bool:
    """Whether a call gives one value for two parameters that one instruction of the function reads.

    Also whether a function returns a value twice or a parameter as it is, which gives it two names.
    """
    bodies: dict[str, str] = {}
    for call in _CALL.finditer(hlo):
        operands, name = _NAME.findall(call[1]), call[2]
        if name not in bodies:
            bodies[name] = _body(hlo, name)
            if not bodies[name] or _returns_twice(bodies[name]):
                return True
        if len(set(operands)) < len(operands) and _read_together(bodies[name], operands):
            return True
    return False


def _body(hlo: str, name: str) -> str:
    start = re.search(rf"^%{re.escape(name)} \(", hlo, re.MULTILINE)
    return "" if start is None else hlo[start.end() : hlo.index("\n}", start.end())]


def _returns_twice(body: str) -> bool:
    root = _ROOT.search(body)
    returned = _NAME.findall(root[1]) if root is not None else []
    parameters = {name for name, _ in _PARAMETER.findall(body)}
    return len(set(returned)) < len(returned) or not parameters.isdisjoint(returned)


def _read_together(body: str, operands: list[str]) -> bool:
    given = {name: operands[int(number)] for name, number in _PARAMETER.findall(body)}
    for line in body.splitlines():
        _, equals, right = line.partition(" = ")
        read = {name for name in _NAME.findall(right) if name in given} if equals else set()
        if len({given[name] for name in read}) < len(read):
            return True
    return False
