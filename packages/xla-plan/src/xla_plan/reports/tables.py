"""Prints plans as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xla_core.contract.foreign_values import JsonObject
from xla_core.support.counters import render_bytes
from xla_plan.planning.plans import Plan

_KINDS: Final = (
    "parameters", "optimizer state", "inputs and padding", "results", "gradients", "activations", "code",
)  # fmt: skip
_MOST_LINES: Final = 3


def _bytes(size: float) -> str:
    """A number of bytes with a unit of powers of 1024, such as GiB."""
    return re.sub(
        r"([KMGTP]?)B$", lambda unit: f" {unit[1]}iB" if unit[1] else " B", render_bytes(size)
    )


def show(plans: Sequence[Plan], console: Console) -> None:
    """Print a summary of all candidates, then memory, time and collectives of each that was compiled."""
    console.print(_summary(plans))
    for plan in plans:
        console.print()
        console.print(Text(plan.candidate.title, style="bold"))
        if plan.scaled:
            console.print(f"  {plan.scaled}")
        if plan.error:
            console.print(Text(f"  refused: {plan.error[:600]}"))
        else:
            console.print(_memory(plan))
            console.print(_time(plan))
            if plan.figures["collectives"]:
                console.print(_collectives(plan))
            console.print(_host(plan))
        for line in plan.advice:
            console.print(Text(f"  change: {line}"))


def _host(plan: Plan) -> str:
    took = plan.figures["seconds"]
    return (
        f"  compiled in {took['compile']:.0f} s ({took['processor']:.0f} s of processor time with recording "
        f"the step), {_bytes(plan.figures['host_peak_bytes'])} of host memory"
    )


def _table(title: str, columns: Iterable[str], left: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def seconds(value: float | None) -> str:
    """A duration with three digits, or ``?`` if it is unknown."""
    if value is None:
        return "?"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def percent(value: float | None) -> str:
    """A fraction in percent, or ``?`` if it is unknown."""
    return "?" if value is None else f"{value:.1%}"


def _summary(plans: Sequence[Plan]) -> Table:
    columns = (
        "topology",
        "mesh",
        "options",
        "HBM per chip",
        "of",
        "fits",
        "step",
        "from",
        "to",
        "MFU",
        "limit",
    )
    table = _table("plans", columns, ("topology", "mesh", "options", "fits", "limit"))
    for plan in plans:
        one, estimated = plan.candidate, plan.estimate
        options = " ".join(f"{k}={v}" for k, v in one.options.items())
        total = _bytes(plan.memory["total"]) if plan.memory["total"] else "?"
        fits = "yes" if plan.fits else "NO"
        rest = ("?",) * 5 if estimated is None else (
            seconds(estimated.seconds), seconds(estimated.low), seconds(estimated.high),
            percent(estimated.mfu), estimated.bound,
        )  # fmt: skip
        table.add_row(one.topology, one.mesh_text, options, total, _bytes(plan.limit), fits, *rest)
    return table


def _memory(plan: Plan) -> Table:
    table = _table("HBM of one chip", (*_KINDS, "total", "of"))
    row = [_bytes(plan.memory[kind]) for kind in _KINDS]
    table.add_row(*row, _bytes(plan.memory["total"]), _bytes(plan.limit))
    return table


def _time(plan: Plan) -> Table:
    estimated, work = plan.estimate, plan.figures["work"]
    assert estimated is not None
    table = _table("one step on one chip", ("what", "amount", "alone it would take"), ("what",))
    flops = work["flops"] + work["kernel_flops"]
    sent = plan.figures["sent"]
    rows: list[tuple[str, str, float]] = [
        ("products", f"{flops / 1e12:.3g} TFLOP", estimated.compute),
        ("HBM traffic", _bytes(int(work["hbm_bytes"])), estimated.hbm),
        ("sent over ICI", _bytes(int(sent["ici"])), estimated.ici),
        ("sent over DCN", _bytes(int(sent["dcn"])), estimated.dcn),
        ("compiler's cycles", f"{work['cycles']:.3g}", estimated.cycles),
        ("kernels", f"{work['kernel_flops'] / 1e12:.3g} TFLOP", estimated.kernels),
    ]
    for name, amount, alone in rows:
        table.add_row(name, amount, seconds(alone))
    whole = f"{seconds(estimated.low)} to {seconds(estimated.high)}"
    table.add_row("step, estimated", whole, seconds(estimated.seconds))
    shares = f"{percent(estimated.mfu_low)} to {percent(estimated.mfu_high)}"
    table.add_row("MFU, estimated", shares, percent(estimated.mfu))
    return table


def _collectives(plan: Plan) -> Table:
    table = _table(
        "between chips", ("kind", "times", "results", "sent", "lines"), ("kind", "lines")
    )
    for row in plan.figures["collectives"]:
        sizes = (_bytes(int(row["bytes"])), _bytes(int(row["sent"])))
        table.add_row(row["kind"], str(row["count"]), *sizes, Text(_lines(row)))
    return table


def _lines(row: JsonObject) -> str:
    named = list(row["lines"].items())
    shown = [f"{line} ({_bytes(int(size))})" for line, size in named[:_MOST_LINES]]
    return ", ".join(shown) + (
        f", {len(named) - _MOST_LINES} more" if len(named) > _MOST_LINES else ""
    )
