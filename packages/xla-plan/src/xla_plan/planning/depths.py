"""Extrapolates the figures of a deep model from those of two shallow ones, linearly in the number of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from xla_core.contract.foreign_values import JsonObject, JsonValue

MSG_DEPTH: Final = (
    "{text!r}: write the option, two different numbers of layers to compile, and the wanted number, such as "
    "layers=4,8,32"
)
# Figures that do not grow with the layers, or that belong to one compilation.
_KEPT: Final = frozenset(
    {"program", "devices", "limit", "from_cache", "unknown_loops", "kind", "host_peak_bytes"}
)


@dataclasses.dataclass(frozen=True)
class Depth:
    """The step function's ``option`` for the number of layers, the two ``compiled`` numbers, and the wanted one."""

    option: str
    compiled: tuple[int, int]
    whole: int

    @property
    def text(self) -> str:
        """A description of the extrapolation."""
        small, large = self.compiled
        return f"{self.option}={small} and {large} compiled, extended to {self.whole}"

    def extend(self, figures: Sequence[Mapping[str, object]]) -> JsonObject:
        """The figures for the wanted number of layers, on the line through those of the compiled numbers."""
        small, large = self.compiled
        return _line(figures[0], figures[1], (self.whole - small) / (large - small))  # type: ignore[no-any-return]


def parse_depth(text: str) -> Depth:
    """Parse ``layers=4,8,32``. Raises ValueError, which shows the form, for other text."""
    option, _, numbers = text.partition("=")
    parts = numbers.split(",")
    if (
        not option.isidentifier()
        or len(parts) != 3
        or not all(n.strip().isdecimal() for n in parts)
    ):
        raise ValueError(MSG_DEPTH.format(text=text))
    small, large, whole = map(int, parts)
    if small == large:
        raise ValueError(MSG_DEPTH.format(text=text))
    return Depth(option, (small, large), whole)


def _line(a: JsonValue, b: JsonValue, along: float) -> JsonValue:
    """Numbers on the line from ``a`` (at 0) to ``b`` (at 1), at ``along``; other values are those of ``b``."""
    if isinstance(b, Mapping):
        zero = dict.fromkeys(b, None)
        first = a if isinstance(a, Mapping) else zero
        return {k: v if k in _KEPT else _line(first.get(k), v, along) for k, v in b.items()}
    if isinstance(b, list):
        others = {row.get("kind"): row for row in a or []}
        return [_line(others.get(row.get("kind"), {}), row, along) for row in b]
    if isinstance(b, bool) or not isinstance(b, int | float):
        return b
    start = a if isinstance(a, int | float) else 0
    value = start + (b - start) * along
    return max(0, round(value) if isinstance(b, int) else value)
