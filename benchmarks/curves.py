"""The curves of ``long_life.py`` as one picture: a small plot for each figure, all over the same steps."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any, Final

SHOWN: Final = {
    "resident_MB": "memory of the process, MB",
    "device_KB": "bytes on the device, KB",
    "values": "values on the device",
    "descriptors": "open descriptors",
    "sockets": "sockets",
    "threads": "threads",
    "mappings": "memory mappings",
    "objects": "objects of Python",
}
"""The figures of a sample that have a plot each, and its title."""
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
WIDTH, HEIGHT, COLUMNS, MARGIN = 300, 120, 2, 70
GREY: Final = "#57606a"

Samples = Sequence[dict[str, Any]]


def drawn(figures: dict[str, Any]) -> str:
    """An SVG of all processes' curves, with the machine and the number of steps in words."""
    processes: list[Samples] = figures["processes"]
    steps = processes[0][-1]["counts"].get("steps", 0)
    rows = -(-(len(SHOWN) + 1) // COLUMNS)
    width, height = COLUMNS * (WIDTH + MARGIN) + 30, rows * (HEIGHT + 60) + 80
    title = f"{steps:,} steps in {processes[0][-1]['minutes']:.0f} minutes, {figures['taken']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" font-family="system-ui, sans-serif" aria-label="{html.escape(title)}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        _text(20, 28, title, 15),
        _text(20, 48, figures["machine"], 11, GREY),
    ]
    plots = [
        (label, [[(_thousands(s), float(s[name])) for s in one] for one in processes])
        for name, label in SHOWN.items()
    ]
    entries = [
        [(_thousands(s), float(sum(s["caches"].values()))) for s in one] for one in processes
    ]
    plots.append(("entries of all listed caches", entries))
    for number, (label, lines) in enumerate(plots):
        left = MARGIN + (number % COLUMNS) * (WIDTH + MARGIN)
        top = 90 + (number // COLUMNS) * (HEIGHT + 60)
        parts += _plot(left, top, label, lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _thousands(sample: dict[str, Any]) -> float:
    return float(sample["counts"].get("steps", 0)) / 1000


def _plot(
    left: float, top: float, label: str, lines: Sequence[Sequence[tuple[float, float]]]
) -> Iterator[str]:
    """Lines over thousands of steps; the other axis begins at 0, so that a flat line is one."""
    most = 1.15 * max(y for line in lines for _, y in line) or 1.0
    end = max(x for line in lines for x, _ in line) or 1.0
    yield _text(left, top - 8, label, 12)
    for share in (0.0, 0.5, 1.0):
        y = top + HEIGHT * (1 - share)
        yield f'<path d="M{left} {y}H{left + WIDTH}" stroke="#d8dee4"/>'
        yield _text(left - 6, y + 4, f"{most * share:,.0f}", 10, GREY, "end")
    for share in (0.0, 0.5, 1.0):
        x = left + WIDTH * share
        yield _text(x, top + HEIGHT + 16, f"{end * share:,.0f}k", 10, GREY, "middle")
    for number, line in enumerate(lines):
        points = " ".join(
            f"{left + WIDTH * x / end:.1f},{top + HEIGHT * (1 - y / most):.1f}" for x, y in line
        )
        colour = COLOURS[number % len(COLOURS)]
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _text(
    x: float, y: float, shown: str, size: int, colour: str = "#202830", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{html.escape(shown)}</text>'
    )
