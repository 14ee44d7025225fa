"""Figures of a deep model from those of two shallow ones: what a layer adds, times the layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

MSG_DEPTH: Final = "{text!r}: write the option, two numbers of layers to compile, and the wanted one: layers=4,8,32"
# What does not grow with the layers, and what is a property of one compilation.
_KEPT: Final = frozenset(
    {"program", "devices", "limit", "from_cache", "unknown_loops", "kind", "host_peak_bytes"}
)


@dataclasses.dataclass(frozen=True)
class Depth:
    """``option`` of the step function says how many layers there are: two are compiled, ``whole`` wanted."""

    option: str
    compiled: tuple[int, int]
    whole: int

    @property
    def text(self) -> str:
        """How the figures came about."""
        small, large = self.compiled
        return f"{self.option}={small} and {large} compiled, extended to {self.whole}"

    def extend(self, figures: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """The figures of the whole, on the line through the two."""
        small, large = self.compiled
        return _line(figures[0], figures[1], (self.whole - small) / (large - small))  # type: ignore[no-any-return]


def parse_depth(text: str) -> Depth:
    """``layers=4,8,32``. Raises ValueError that shows the form."""
    option, _, numbers = text.partition("=")
    counts = [n for n in numbers.split(",") if n.strip().isdecimal()]
    if (
        not option.isidentifier()
        or len(counts) != 3
        or len(set(counts)) < 2
        or counts[0] == counts[1]
    ):
        raise ValueError(MSG_DEPTH.format(text=text))
    small, large, whole = map(int, counts)
    return Depth(option, (small, large), whole)


def _line(a: Any, b: Any, along: float) -> Any:
    """Every number at ``along`` on the way from ``a`` (0) to ``b`` (1); what is no number as in ``b``."""
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
