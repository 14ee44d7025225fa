"""The plots of a report, drawn with ``xla_core.support.svg``."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from xla_core.support import svg
from xla_core.support.svg import Series

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 12, 46


def stacked_bars(
    places: Sequence[int], series: Sequence[Series], *, x_title: str, y_title: str, top: float
) -> str:
    """One bar for each of ``places``, with a part for each of ``series``, and a legend.

    Bars are cut off at ``top``.
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
                parts.append(svg.rect(_LEFT + i * width, high, width - gap, low - high, one.colour))
        parts_text = "\n".join(
            f"{s.name}: {s.values[i]:.2f}" for s in series if s.values[i] >= 0.005
        )
        shapes.append(svg.told(f"{place}: {base:.2f}\n{parts_text}", "".join(parts)))
    ticks = [
        (_LEFT + (i + 0.5) * width, str(places[i])) for i in _spread(len(places)) if len(places)
    ]
    return svg.legend(series) + plot.svg("".join(shapes), ticks, x_title, y_title)


def horizontal_bars(rows: Sequence[tuple[str, float, str]], colour: str, x_title: str) -> str:
    """One bar for each row, which has a label, a value, and a text beside the bar."""
    row, left = 34, 260
    height = _TOP + row * len(rows) + _BOTTOM
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    room = svg.WIDTH - left - 190  # for the text beside the longest bar
    bottom = _TOP + row * len(rows)
    shapes = []
    for tick in svg.ticks(most):
        x = left + room * tick / most
        shapes.append(svg.rule(x, _TOP, x, bottom))
        shapes.append(svg.text(x, bottom + 18, svg.number(tick), "middle", svg.GREY))
    for i, (label, value, text) in enumerate(rows):
        middle, length = _TOP + row * (i + 0.5), room * value / most
        shapes.append(svg.text(left - 10, middle + 5, label, "end"))
        shapes.append(svg.rect(left, middle - 11, max(length, 1), 22, colour))
        shapes.append(svg.text(left + length + 8, middle + 5, text))
    shapes.append(svg.text(left + room / 2, height - 6, x_title, "middle", svg.GREY))
    return svg.drawing(height, "".join(shapes))


def line(
    points: Sequence[tuple[float, float]], colour: str, *, x_title: str, y_title: str, unit: str
) -> str:
    """Points joined by a line. The pointer shows the value of a point, with its ``unit``."""
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
        shapes += svg.told(f"{svg.number(a)}: {b:.2f} {unit}", dot)
    ticks = [(x(points[i][0]), svg.number(points[i][0])) for i in _spread(len(points))]
    return plot.svg(shapes, ticks, x_title, y_title)


class _Plot:
    """Two axes, the vertical one from 0 to ``most``, and the area between them."""

    def __init__(self, height: int, most: float) -> None:
        self.height = height
        self.most = most or 1.0
        self.bottom = height - _BOTTOM
        self.width = svg.WIDTH - _LEFT - _RIGHT

    def y(self, value: float) -> float:
        """The vertical position of a value; the top for values above ``most``."""
        return self.bottom - (self.bottom - _TOP) * min(value, self.most) / self.most

    def svg(
        self, shapes: str, ticks: Iterable[tuple[float, str]], x_title: str, y_title: str
    ) -> str:
        """The plot: axes, ticks, titles, and ``shapes``."""
        drawn = []
        for tick in svg.ticks(self.most):
            drawn.append(svg.rule(_LEFT, self.y(tick), svg.WIDTH - _RIGHT, self.y(tick)))
            drawn.append(svg.text(_LEFT - 8, self.y(tick) + 5, svg.number(tick), "end", svg.GREY))
        drawn.append(shapes)
        for x, label in ticks:
            drawn.append(svg.text(x, self.bottom + 18, label, "middle", svg.GREY))
        drawn.append(svg.text(_LEFT + self.width / 2, self.height - 6, x_title, "middle", svg.GREY))
        middle = (_TOP + self.bottom) / 2
        drawn.append(
            f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle" '
            f'fill="{svg.GREY}">{html.escape(y_title)}</text>'
        )
        return svg.drawing(self.height, "".join(drawn))


def _spread(count: int) -> list[int]:
    """The indices of about ten of ``count`` places, which get labels."""
    step = max(1, -(-count // 10))
    return list(range(0, count, step))
