"""Draws the documentation's pictures into ``docs/pictures/*.svg`` from what really runs.

``python tools/pictures.py`` draws all, each in a process of its own (one of them shows eight devices as one);
``python tools/pictures.py memory`` draws one. They are drawn again when what they show has changed.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.utils.checkpoint import checkpoint
from xla_core.extension_api.programs import all_programs
from xla_debug import memory

PICTURES: Final = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS: Final = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#9c755f",
)  # fmt: skip
DARK, GREY, LIGHT = "#202830", "#78828c", "#eef2f6"
SANS, MONO = "system-ui, sans-serif", "ui-monospace, monospace"


# -- SVG -----------------------------------------------------------------------------------------


def text(
    x: float, y: float, shown: str, *, size: int = 13, colour: str = DARK, font: str = SANS,
    anchor: str = "start",
) -> str:  # fmt: skip
    """One line of text; its left end (or what ``anchor`` says) is at x, its base line at y."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="{font}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}" xml:space="preserve">{html.escape(shown, quote=False)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, line: str = GREY) -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="{fill}" stroke="{line}"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """An arrow between two points."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GREY}" '
        'stroke-width="1.5" marker-end="url(#head)"/>'
    )


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole SVG file; ``title`` is what a reader hears who does not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{html.escape(title)}">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>'
    )
    back = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, marker, back, *parts, "</svg>"]) + "\n"


# -- The pictures --------------------------------------------------------------------------------


def draw_trace() -> str:
    """Lines of Python, their trace, the program, and the buffers before and after it."""
    x, w = torch.ones(2, 3).to("xla"), torch.ones(3, 4).to("xla")
    torch_xla.sync()
    total = torch.relu(x @ w).sum()
    graph = torch_xla._XLAC._get_xla_tensors_dot([total])
    program = xm.get_stablehlo([total])
    labels = dict(re.findall(r'(node\d+) \[label="(.*?)\\nxla_shape', graph))
    edges = re.findall(r"(node\d+) -> (node\d+)", graph)
    parts = [
        text(20, 30, "1  You call operators", size=15),
        text(280, 30, "2  The trace", size=15),
        text(520, 30, "3  sync(): one program", size=15),
        text(860, 30, "4  Buffers", size=15),
    ]
    for number, line in enumerate(
        ["x = ones(2, 3)", "w = ones(3, 4)", "y = relu(x @ w)", "t = y.sum()"]
    ):
        parts.append(text(20, 70 + 26 * number, line, font=MONO))
    parts += _nodes(labels, edges)
    shown = [line for line in program.splitlines() if "stablehlo" in line or "return" in line]
    parts.append(box(510, 50, 320, 30 + 22 * len(shown), LIGHT))
    for number, line in enumerate(shown):
        brief = re.sub(r"[:,(] ?.*| dense.*", "", line.strip().removeprefix("func.func ")).strip()
        parts.append(text(522, 76 + 22 * number, brief, font=MONO, size=12))
    torch_xla.sync()
    for number, (name, tensor) in enumerate({"x": x, "w": w, "t": total}.items()):
        size = tensor.nelement() * tensor.element_size()
        parts.append(box(860, 50 + 50 * number, 150, 36, "#dcebdc" if name == "t" else "#dce6f2"))
        shape = "x".join(map(str, tensor.shape)) or "number"
        parts.append(text(872, 73 + 50 * number, f"{name}: {shape}, {size} bytes", size=12))
    parts.append(arrow(195, 110, 255, 110))
    parts.append(arrow(470, 110, 505, 110))
    parts.append(arrow(832, 110, 856, 110))
    parts.append(text(860, 225, "t is new; x and w stay", size=12, colour=GREY))
    parts.append(text(20, 195, "nothing is computed yet", size=12, colour=GREY))
    return picture(1030, 330, "Python lines become a trace, one program, and buffers", parts)


def _nodes(labels: dict[str, str], edges: Sequence[tuple[str, str]]) -> list[str]:
    """A graph from top to bottom: each node one row below the lowest of those it reads."""
    rows = dict.fromkeys(labels, 0)
    for source, target in edges:  # in the order of the trace
        rows[target] = max(rows[target], rows[source] + 1)
    places: dict[str, tuple[float, float]] = {}
    for node, row in rows.items():
        beside = [other for other in rows if rows[other] == row]
        left = 365 - 52.5 * len(beside) + 105 * beside.index(node)
        places[node] = (left, 50 + 68 * row)
    parts = []
    for source, target in edges:
        (x1, y1), (x2, y2) = places[source], places[target]
        parts.append(arrow(x1 + 50, y1 + 38, x2 + 50, y2 - 1))
    for node, (x, y) in places.items():
        name, kind = labels[node].split("\\n")[:2]
        fill = "#dce6f2" if "device_data" in name else LIGHT
        parts.append(box(x, y, 100, 38, fill))
        parts.append(text(x + 50, y + 16, name.split("::")[1], size=12, anchor="middle"))
        parts.append(
            text(x + 50, y + 31, kind.split("{")[0], size=10, colour=GREY, anchor="middle")
        )
    return parts


def draw_sharding() -> str:
    """Where the parts of an 8x8 tensor lie over a mesh of 2 x 4 devices, for four specs."""
    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "model"))
    parts = []
    for number, device in enumerate(range(8)):
        parts.append(box(20 + 115 * number, 18, 16, 16, COLOURS[device], "#ffffff"))
        place = f"data {device // 4}, model {device % 4}"
        parts.append(text(40 + 115 * number, 31, f"{device}: {place}", size=10))
    specs: list[tuple[object, ...]] = [
        ("data", None),
        (None, "model"),
        ("data", "model"),
        (None, None),
    ]
    for number, spec in enumerate(specs):
        tensor = torch.zeros(8, 8).to("xla")
        sharded = xs.mark_sharding(tensor, mesh, spec)
        parts += _parts_of(sharded.local_shards, 30 + 235 * number, 60)
        parts.append(text(30 + 235 * number, 285, _spec_text(spec), font=MONO, size=12))
    return picture(960, 305, "Which device holds which part of a tensor, for four specs", parts)


def _spec_text(spec: Sequence[Any]) -> str:
    return f"({', '.join('None' if axis is None else repr(axis) for axis in spec)})"


def _parts_of(shards: Sequence[Any], left: float, top: float) -> list[str]:
    """A tensor as a square; a part has a dark border, and a stripe for each device that holds it."""
    unit = 200 / 8
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, shard in enumerate(shards):
        spans = (
            [(0, 8)] * 2 if shard.indices is Ellipsis else [s.indices(8)[:2] for s in shard.indices]
        )
        holders.setdefault(tuple(n for span in spans for n in span), []).append(device)
    drawn = []
    for (y0, y1, x0, x1), devices in holders.items():
        width = (x1 - x0) * unit / len(devices)
        for number, device in enumerate(devices):
            x, y, height = left + x0 * unit + number * width, top + y0 * unit, (y1 - y0) * unit
            drawn.append(box(x, y, width, height, COLOURS[device], COLOURS[device]))
            drawn.append(
                text(
                    x + width / 2,
                    y + height / 2 + 5,
                    str(device),
                    colour="#ffffff",
                    anchor="middle",
                )
            )
        drawn.append(
            f'<rect x="{left + x0 * unit:.1f}" y="{top + y0 * unit:.1f}" fill="none" '
            f'width="{(x1 - x0) * unit:.1f}" height="{(y1 - y0) * unit:.1f}" '
            f'stroke="{DARK}" stroke-width="3"/>'
        )
    return drawn


def timeline(rematerialized: bool) -> list[int]:
    """Bytes that are alive at each operation of a training step of eight blocks."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    model = nn.Sequential(*blocks).to("xla")
    x = torch.randn(2048, 64).to("xla")
    torch_xla.sync()
    with memory.tracking():
        value = x
        for block in model:
            value = (
                checkpoint(block, value, use_reentrant=False) if rematerialized else block(value)
            )
        value.square().mean().backward()
        torch_xla.sync()
        return [size for _, size in memory.step_timeline(all_programs()[-1])]


def draw_memory() -> str:
    """Memory over one training step, with and without rematerialization."""
    lines = {"as it is": timeline(False), "rematerialized": timeline(True)}
    most = max(map(max, lines.values()))
    left, top, width, height = 70, 50, 830, 240
    parts = [
        text(
            20,
            28,
            "Memory over a training step of eight blocks (MiB alive at each operation)",
            size=15,
        )
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + height * (1 - share)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#d8dee4"/>')
        parts.append(text(left - 8, y + 4, f"{most * share / 2**20:.0f}", size=11, anchor="end"))
    for number, (name, sizes) in enumerate(lines.items()):
        step = width / (len(sizes) - 1)
        points = " ".join(
            f"{left + n * step:.1f},{top + height * (1 - size / most):.1f}"
            for n, size in enumerate(sizes)
        )
        colour = COLOURS[number]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        said = f"{name}: at most {max(sizes) / 2**20:.0f} MiB, {len(sizes)} operations"
        parts.append(text(left + 20 + 330 * number, 325, said, colour=colour))
    parts.append(text(left, 308, "forward", size=11, colour=GREY))
    parts.append(text(left + width, 308, "backward", size=11, colour=GREY, anchor="end"))
    return picture(
        930, 345, "Memory over a training step, with and without rematerialization", parts
    )


DRAWN: Final = {"trace": draw_trace, "sharding": draw_sharding, "memory": draw_memory}


def main(names: Sequence[str]) -> None:
    """Draw the pictures with these names, or each in a process of its own."""
    PICTURES.mkdir(exist_ok=True)
    for name in names:
        (PICTURES / f"{name}.svg").write_text(DRAWN[name](), "utf-8")
    if not names:
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
        for name in DRAWN:
            subprocess.run([sys.executable, __file__, name], check=True, env=environment)


if __name__ == "__main__":
    main(sys.argv[1:])
