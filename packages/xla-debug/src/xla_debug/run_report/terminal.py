"""Prints a recorded run as tables on the terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xla_core.support.counters import render_bytes
from xla_debug.run_report import advice, findings, html_report
from xla_debug.run_report.advice import Advice
from xla_debug.run_report.findings import CauseRow
from xla_debug.run_report.recorder import Recorder
from xla_debug.run_report.records import PARTS

WIDTH: Final = 120
"""The number of columns if the output is not a terminal: wide enough for lines of code."""


def show(recorder: Recorder, console: Console) -> None:
    """Print the tables and the advice."""
    steps = recorder.steps
    count = f"{len(steps)} step{'s' * (len(steps) != 1)}"
    console.rule(f"xla-debug: {count} in {recorder.seconds:.1f} s")
    if not steps:
        console.print("no step was run on an xla device (nothing called torch_xla.sync())")
        changes = advice.advice(recorder)
        if changes:
            _show_advice(changes, "", console)
        return
    console.print(f"of these, {recorder.startup:.1f} s before the script used the device")
    console.print(_parts_table(recorder))
    console.print(_causes_table(findings.causes(recorder)))
    spots = sorted(recorder.spots.values(), key=lambda s: -s.nanoseconds)
    if spots:
        table = _table("lines that made the host wait", "what", "times", "time", "line", "code")
        for spot in spots[:10]:
            row = (spot.label, str(spot.count), advice.seconds_text(spot.nanoseconds / 1e9))
            code = Text(advice.code(spot.frame), overflow="ellipsis", no_wrap=True)
            table.add_row(*row, Text(advice.place(spot.frame)), code)
        console.print(table)
    memory = [s.memory for s in steps if s.memory is not None]
    if memory:
        console.print(
            f"device memory after a step: {render_bytes(memory[0])} in the first, "
            f"{render_bytes(memory[-1])} in the last, {render_bytes(max(memory))} at most"
        )
    _show_advice(advice.advice(recorder), advice.note(recorder), console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in columns:
        numeric = column in (
            "times",
            "time",
            "seconds",
            "programs",
            "ms",
            "share",
            "ms when nothing compiles",
        )
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _parts_table(recorder: Recorder) -> Table:
    table = _table(
        "where the time of the steps went", "part", "seconds", "share", "ms when nothing compiles"
    )
    totals = advice.totals(recorder)
    quiet = advice.steady(recorder)
    whole = sum(totals.values()) or 1.0
    for part in PARTS:
        steady = f"{quiet[part]:.2f}" if quiet else ""
        table.add_row(
            html_report.LABELS[part], f"{totals[part]:.2f}", f"{totals[part] / whole:.0%}", steady
        )
    mean = f"{sum(quiet.values()):.2f}" if quiet else ""
    table.add_row("step", f"{sum(totals.values()):.2f}", "100%", mean)
    return table


def _causes_table(rows: list[CauseRow]) -> Table:
    table = _table(
        "programs by cause", "cause", "programs", "seconds", "line, and what was different"
    )
    for row in rows:
        text = Text("\n".join(filter(None, (row.where, row.example.code, row.example.text))))
        table.add_row(row.cause.value, str(row.count), f"{row.seconds:.2f}", text)
    return table


def _show_advice(changes: list[Advice], note: str, console: Console) -> None:
    if changes:
        console.print("change first:", style="bold")
    else:
        console.print("nothing stands out: no change would save 1 % of this run")
    for number, one in enumerate(changes, 1):
        console.print(Text(f"{number}. {one.title} ({one.cost}) at {one.where}"))
        for line in filter(None, (one.code, one.how)):
            console.print(Padding(Text(line), (0, 0, 0, 3), expand=False))
    if note:
        console.print(Text(note))
