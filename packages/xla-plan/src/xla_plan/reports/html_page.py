"""Plans as one HTML page with plots, which needs nothing from elsewhere."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go
from rich.console import Console

from xla_plan.planning.plans import Plan
from xla_plan.reports import tables

_KINDS: Final = (
    "parameters", "optimizer state", "inputs and padding", "results", "gradients", "activations", "code",
)  # fmt: skip
_GIB: Final = 1 << 30
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#222}"
    "pre{font-size:12px;overflow-x:auto}"
)


def render(plans: Sequence[Plan], title: str) -> str:
    """The page: memory by kind against the chip's, step times with their bounds, and the tables."""
    known = [p for p in plans if p.estimate is not None]
    parts = [_memory(plans).to_html(full_html=False, include_plotlyjs=True)]
    if known:
        parts.append(_times(known).to_html(full_html=False, include_plotlyjs=False))
    file = io.StringIO()
    tables.show(plans, Console(file=file, width=150, highlight=False))
    text = html.escape(file.getvalue())
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>{''.join(parts)}"
        f"<h2>Figures</h2><pre>{text}</pre></body></html>"
    )


def _names(plans: Sequence[Plan]) -> list[str]:
    return [f"{number}: {p.candidate.title}" for number, p in enumerate(plans, 1)]


def _memory(plans: Sequence[Plan]) -> go.Figure:
    names = _names(plans)
    bars = [
        go.Bar(y=names, x=[p.memory.get(k, 0) / _GIB for p in plans], name=k, orientation="h")
        for k in _KINDS
    ]
    if any(p.error for p in plans):
        refused = [p.memory["total"] / _GIB if p.error else 0 for p in plans]
        bars.append(go.Bar(y=names, x=refused, name="refused", orientation="h"))
    limits = go.Scatter(
        y=names, x=[p.limit / _GIB for p in plans], mode="markers", name="the chip has",
        marker={"symbol": "line-ns-open", "size": 26, "color": "black", "line": {"width": 3}},
    )  # fmt: skip
    return _figure([*bars, limits], "HBM of one chip, GiB", len(plans), stacked=True)


def _times(plans: Sequence[Plan]) -> go.Figure:
    names = _names(plans)
    estimates = [p.estimate for p in plans if p.estimate is not None]
    traces = [
        go.Bar(y=names, x=[getattr(e, part) for e in estimates], name=label, orientation="h")
        for part, label in (
            ("compute", "products at the peak"), ("hbm", "HBM traffic"), ("ici", "ICI"), ("dcn", "DCN"),
        )
    ]  # fmt: skip
    error = {
        "type": "data", "symmetric": False,
        "array": [e.high - e.seconds for e in estimates], "arrayminus": [e.seconds - e.low for e in estimates],
    }  # fmt: skip
    step = go.Scatter(
        y=names, x=[e.seconds for e in estimates], error_x=error, mode="markers", name="step, estimated",
        marker={"size": 12, "color": "black"},
    )  # fmt: skip
    return _figure([*traces, step], "seconds of one step", len(plans), stacked=False)


def _figure(
    traces: list[go.Bar | go.Scatter], title: str, rows: int, *, stacked: bool
) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(
        barmode="stack" if stacked else "group", title=title, template="plotly_white",
        height=290 + rows * (50 if stacked else 110), yaxis={"autorange": "reversed"},
    )  # fmt: skip
    return figure
