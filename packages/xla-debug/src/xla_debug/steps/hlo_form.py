"""Converts HLO texts to torch_xla's form, which scripts search: operands with types, and inputs called ``p0``."""

from __future__ import annotations

import re
from typing import Final

_DEFINED: Final = re.compile(
    r"^(\s+(?:ROOT )?(%[\w.\-]+) = )(\(.*?\)|\S+)( [\w\-]+\()([^)]*)\)", re.M
)
_NAME: Final = re.compile(r"%[\w.\-]+")
_INPUT: Final = re.compile(r"\bArg_(\d+)\b")


def torch_xla_form(hlo: str) -> str:
    """``hlo`` with the type in front of each operand, and inputs called ``p0.1``, ``p1.1``, ..."""
    types = {definition[2]: definition[3] for definition in _DEFINED.finditer(hlo)}

    def typed(match: re.Match[str]) -> str:
        operands = _NAME.sub(lambda n: f"{types[n[0]]} {n[0]}" if n[0] in types else n[0], match[5])
        return f"{match[1]}{match[3]}{match[4]}{operands})"

    return _INPUT.sub(r"p\1", _DEFINED.sub(typed, hlo))
