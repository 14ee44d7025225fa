"""Plans as one self-contained HTML page with plots."""

from __future__ import annotations

import html
import io
import string
from collections.abc import Sequence
from importlib import resources
from typing import Final

from rich.console import Console

from xla_core.support import svg
from xla_plan.planning.estimate import Estimate
from xla_plan.planning.plans import Plan
from xla_plan.reports import tables

_KINDS: Final = (
    "parameters", "optimizer state", "inputs and padding", "results", "gradients", "activations", "code",
    "refused",
)  # fmt: skip
_TIMES: Final = (
    ("compute", "products at the peak"), ("hbm", "HBM traffic"), ("ici", "ICI"), ("dcn", "DCN"),
)  # fmt: skip
_GIB: Final = 1 << 30
_LEFT: Final = 20
_ROOM: Final = svg.WIDTH - 2 * _LEFT
_LABEL, _BAR, _SPACE, _AXIS = 24, 20, 14, 48
"""Heights of a candidate's name, of a bar, of the space below the bars, and of the axis with its title."""


def render(plans: Sequence[Plan], title: str) -> str:
    """The page: memory by kind with the chip's limit, step times with their bounds, and the tables."""
    parts = ["<h2>HBM of one chip, GiB</h2>", _memory(plans)]
    if any(p.estimate is not None for p in plans):
        parts += ["<h2>Seconds of one step</h2>", _times(plans)]
    file = io.StringIO()
    tables.show(plans, Console(file=file, width=150, highlight=False))
    page = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    return string.Template(page).substitute(
        title=html.escape(title),
        plot_style=svg.STYLE,
        plots="".join(parts),
        figures=html.escape(file.getvalue()),
    )


def _names(plans: Sequence[Plan]) -> list[str]:
    return [f"{number}: {p.candidate.title}" for number, p in enumerate(plans, 1)]


def _memory(plans: Sequence[Plan]) -> str:
    """A bar for each plan, stacked by kinds of memory, and a mark for the chip's memory."""
    sizes = [_kinds(p) for p in plans]
    series = [
        svg.Series(kind, colour, [size.get(kind, 0.0) for size in sizes])
        for kind, colour in zip(_KINDS, svg.COLOURS, strict=True)
        if any(size.get(kind) for size in sizes)
    ]
    limits = [p.limit / _GIB for p in plans]
    scale = _Scale(max([*limits, *(sum(size.values()) for size in sizes)]))
    shapes, top = [], 0.0
    for i, name in enumerate(_names(plans)):
        shapes.append(svg.text(_LEFT, top + _LABEL - 7, name))
        start, middle = 0.0, top + _LABEL
        for one in series:
            bar = svg.rect(scale.x(start), middle, scale.length(one.values[i]), _BAR, one.colour)
            shapes.append(svg.told(f"{one.name}: {one.values[i]:.2f} GiB", bar))
            start += one.values[i]
        mark = svg.rect(scale.x(limits[i]) - 1.5, middle - 4, 3, _BAR + 8, "#222222")
        shapes.append(svg.told(f"the chip has {limits[i]:.2f} GiB", mark))
        top += _LABEL + _BAR + _SPACE
    limit = svg.Series("the chip has", "#222222", limits)
    return svg.legend([*series, limit]) + scale.drawing(top, shapes, "GiB")


def _kinds(plan: Plan) -> dict[str, float]:
    if plan.error:
        return {"refused": plan.memory["total"] / _GIB}
    return {kind: plan.memory.get(kind, 0) / _GIB for kind in _KINDS}


def _times(plans: Sequence[Plan]) -> str:
    """For each plan the time of each resource, and the step time with its bounds."""
    rows = [
        (name, p.estimate)
        for name, p in zip(_names(plans), plans, strict=True)
        if p.estimate is not None
    ]
    series = [
        svg.Series(label, colour, [getattr(e, part) for _, e in rows])
        for (part, label), colour in zip(_TIMES, svg.COLOURS, strict=False)
    ]
    scale = _Scale(max(e.high for _, e in rows))
    shapes, top = [], 0.0
    for i, (name, estimate) in enumerate(rows):
        shapes.append(svg.text(_LEFT, top + _LABEL - 7, name))
        top += _LABEL
        for one in series:
            bar = svg.rect(_LEFT, top, scale.length(one.values[i]), _BAR - 8, one.colour)
            shapes.append(svg.told(f"{one.name}: {one.values[i]:.4g} s", bar))
            top += _BAR - 8
        shapes.append(_bounds(estimate, scale, top + 4))
        top += _BAR + _SPACE
    step = svg.Series("step, estimated, with its bounds", "#222222", [])
    return svg.legend([*series, step]) + scale.drawing(top, shapes, "seconds")


def _bounds(estimate: Estimate, scale: _Scale, top: float) -> str:
    low, step, high = (scale.x(s) for s in (estimate.low, estimate.seconds, estimate.high))
    line = svg.rect(low, top + 5, high - low, 2, "#222222")
    ends = "".join(svg.rect(x - 1, top + 1, 2, 10, "#222222") for x in (low, high))
    text = f"{estimate.seconds:.4g} s ({estimate.low:.4g} to {estimate.high:.4g})"
    return svg.told(text, line + ends + svg.rect(step - 5, top + 1, 10, 10, "#222222"))


class _Scale:
    """A horizontal axis from 0 to ``most``."""

    def __init__(self, most: float) -> None:
        self.most = most or 1.0

    def length(self, value: float) -> float:
        """The length of a bar for ``value``."""
        return _ROOM * value / self.most

    def x(self, value: float) -> float:
        """The horizontal position of ``value``."""
        return _LEFT + self.length(value)

    def drawing(self, bottom: float, shapes: Sequence[str], title: str) -> str:
        """The drawing: grid lines, ``shapes`` in front of them, and the axis below ``bottom``."""
        behind = [svg.rule(self.x(t), 0, self.x(t), bottom) for t in svg.ticks(self.most)]
        below = [
            svg.text(self.x(t), bottom + 18, svg.number(t), "middle", svg.GREY)
            for t in svg.ticks(self.most)
        ]
        below.append(svg.text(_LEFT + _ROOM / 2, bottom + 40, title, "middle", svg.GREY))
        return svg.drawing(bottom + _AXIS, "".join([*behind, *shapes, *below]))
