"""What plots in reports are drawn with, as SVG: a few kilobytes each, drawn by any browser without a script.

A shape tells its figures when the pointer rests on it (``title``). Colours are Okabe and Ito's, told apart with
every kind of colour vision.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Final

__all__ = [
    "COLOURS",
    "GREY",
    "STYLE",
    "Series",
    "WIDTH",
    "drawing",
    "legend",
    "number",
    "rect",
    "rule",
    "text",
    "ticks",
    "told",
]

WIDTH: Final = 1000
"""The width of a plot, in the units that shapes are placed in."""
GREY: Final = "#57606a"
COLOURS: Final = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999",
)  # fmt: skip
STYLE: Final = (
    ".wide{overflow-x:auto}.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin-bottom:.3rem}"
    ".legend i{display:inline-block;width:.9em;height:.9em;margin-right:.4em;vertical-align:-.1em}"
    "svg.plot{width:100%;min-width:640px;font-family:system-ui,sans-serif;display:block}"
)
"""The style sheet that the shapes need on a page."""
_TICKS: Final = 5


@dataclasses.dataclass(frozen=True)
class Series:
    """One kind of bar: its name, its colour, and a value for each place on the axis."""

    name: str
    colour: str
    values: Sequence[float]


def drawing(height: float, content: str) -> str:
    """A plot of this height with shapes in it; it is as wide as the page."""
    return (
        f'<div class="wide"><svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-size="14">{content}</svg></div>'
    )


def legend(series: Sequence[Series]) -> str:
    """What the colours stand for."""
    names = "".join(
        f'<span><i style="background:{one.colour}"></i>{html.escape(one.name)}</span>'
        for one in series
    )
    return f'<div class="legend">{names}</div>'


def told(text: str, shapes: str) -> str:
    """Shapes that say ``text`` when the pointer rests on them."""
    return f"<g><title>{html.escape(text)}</title>{shapes}</g>"


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle; ``x`` and ``y`` are its upper left corner."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def rule(x: float, y: float, x_end: float, y_end: float) -> str:
    """A thin grey line."""
    return f'<path d="M{x:.1f} {y:.1f}L{x_end:.1f} {y_end:.1f}" stroke="#d8dee4"/>'


def text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#1b1f24") -> str:
    """A text that begins at ``x``, or ends there (``anchor`` "end"), or has it in the middle ("middle")."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``."""
    rough = most / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough * 0.999)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Up to six digits."""
    return f"{value:.6g}"
