"""The plots of a report as SVG: a few kilobytes each, drawn by any browser without a script.

A shape tells its figures when the pointer rests on it (``title``). Colours are Okabe and Ito's, told apart with
every kind of colour vision.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

WIDTH: Final = 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 12, 46
_TICKS: Final = 5
_GREY: Final = "#57606a"


@dataclasses.dataclass(frozen=True)
class Series:
    """One kind of bar: its name, its colour, and a value for each place on the axis."""

    name: str
    colour: str
    values: Sequence[float]


def stacked_bars(
    places: Sequence[int], series: Sequence[Series], *, x_title: str, y_title: str, top: float
) -> str:
    """Bars made of one part for each of ``series`` at each of ``places``, and a legend.

    Bars that are higher than ``top`` are cut off there.
    """
    plot = _Plot(300, top)
    width = plot.width / max(len(places), 1)
    gap = min(2.0, width * 0.15)
    shapes = []
    for i, place in enumerate(places):
        base = 0.0
        parts = []
        for one in series:
            value = one.values[i]
            low, high = plot.y(base), plot.y(base + value)
            base += value
            if low - high >= 0.05:
                parts.append(_rect(_LEFT + i * width, high, width - gap, low - high, one.colour))
        parts_text = "\n".join(
            f"{s.name}: {s.values[i]:.2f}" for s in series if s.values[i] >= 0.005
        )
        shapes.append(_told(f"{place}: {base:.2f}\n{parts_text}", "".join(parts)))
    ticks = [
        (_LEFT + (i + 0.5) * width, str(places[i])) for i in _spread(len(places)) if len(places)
    ]
    return _legend(series) + plot.svg("".join(shapes), ticks, x_title, y_title)


def horizontal_bars(rows: Sequence[tuple[str, float, str]], colour: str, x_title: str) -> str:
    """One bar a row: label, value and the text beside it."""
    row, left = 34, 260
    height = _TOP + row * len(rows) + _BOTTOM
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    room = WIDTH - left - 190  # for the text beside the longest bar
    bottom = _TOP + row * len(rows)
    shapes = []
    for tick in _ticks(most):
        x = left + room * tick / most
        shapes.append(_rule(x, _TOP, x, bottom))
        shapes.append(_text(x, bottom + 18, _number(tick), "middle", _GREY))
    for i, (label, value, text) in enumerate(rows):
        middle, length = _TOP + row * (i + 0.5), room * value / most
        shapes.append(_text(left - 10, middle + 5, label, "end"))
        shapes.append(_rect(left, middle - 11, max(length, 1), 22, colour))
        shapes.append(_text(left + length + 8, middle + 5, text))
    shapes.append(_text(left + room / 2, height - 6, x_title, "middle", _GREY))
    return _svg(height, "".join(shapes))


def line(
    points: Sequence[tuple[float, float]], colour: str, *, x_title: str, y_title: str, unit: str
) -> str:
    """Points joined by a line; ``unit`` is said with the values that the pointer asks for."""
    plot = _Plot(260, 1.08 * max((y for _, y in points), default=0.0))
    first, last = (points[0][0], points[-1][0]) if points else (0.0, 0.0)
    span = (last - first) or 1.0

    def x(value: float) -> float:
        return _LEFT + plot.width * ((value - first) / span if last > first else 0.5)

    path = " ".join(f"{x(a):.1f},{plot.y(b):.1f}" for a, b in points)
    shapes = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    radius = 3.5 if len(points) < 100 else 1.5
    for a, b in points:
        dot = f'<circle cx="{x(a):.1f}" cy="{plot.y(b):.1f}" r="{radius}" fill="{colour}"/>'
        shapes += _told(f"{_number(a)}: {b:.2f} {unit}", dot)
    ticks = [(x(points[i][0]), _number(points[i][0])) for i in _spread(len(points))]
    return plot.svg(shapes, ticks, x_title, y_title)


class _Plot:
    """Axes from 0 to ``most`` upwards, and the area between them."""

    def __init__(self, height: int, most: float) -> None:
        self.height = height
        self.most = most or 1.0
        self.bottom = height - _BOTTOM
        self.width = WIDTH - _LEFT - _RIGHT

    def y(self, value: float) -> float:
        """Where a value is; what is too high is at the top."""
        return self.bottom - (self.bottom - _TOP) * min(value, self.most) / self.most

    def svg(
        self, shapes: str, ticks: Iterable[tuple[float, str]], x_title: str, y_title: str
    ) -> str:
        """The axes and, on them, the shapes."""
        drawn = []
        for tick in _ticks(self.most):
            drawn.append(_rule(_LEFT, self.y(tick), WIDTH - _RIGHT, self.y(tick)))
            drawn.append(_text(_LEFT - 8, self.y(tick) + 5, _number(tick), "end", _GREY))
        drawn.append(shapes)
        for x, label in ticks:
            drawn.append(_text(x, self.bottom + 18, label, "middle", _GREY))
        drawn.append(_text(_LEFT + self.width / 2, self.height - 6, x_title, "middle", _GREY))
        middle = (_TOP + self.bottom) / 2
        drawn.append(
            f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle" '
            f'fill="{_GREY}">{html.escape(y_title)}</text>'
        )
        return _svg(self.height, "".join(drawn))


def _svg(height: float, content: str) -> str:
    return (
        f'<div class="wide"><svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-size="14">{content}</svg></div>'
    )


def _legend(series: Sequence[Series]) -> str:
    names = "".join(
        f'<span><i style="background:{one.colour}"></i>{html.escape(one.name)}</span>'
        for one in series
    )
    return f'<div class="legend">{names}</div>'


def _told(text: str, shapes: str) -> str:
    return f"<g><title>{html.escape(text)}</title>{shapes}</g>"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _rule(x: float, y: float, x_end: float, y_end: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{x_end:.1f} {y_end:.1f}" stroke="#d8dee4"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#1b1f24") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``."""
    rough = most / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough * 0.999)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}"


def _spread(count: int) -> list[int]:
    """Indices of about ten labels for so many places."""
    step = max(1, -(-count // 10))
    return list(range(0, count, step))
