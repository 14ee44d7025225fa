"""``xla-debug run``: runs a script and reports where its time went, as tables and as an HTML page."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

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

MSG_NO_SCRIPT: Final = "xla-debug run: {} is no file; name a script, or with -m a module\n"
_WIDTH: Final = 120  # where the output is no terminal: lines of code should not be cut


def add_parser(commands: Any) -> None:
    """Declare the command's arguments."""
    found = commands.add_parser(
        "run", help="run a script, then say where its time went and what to change first"
    )
    found.add_argument(
        "-o", "--output", default="xla-debug.html", help="the HTML page (%(default)s)"
    )
    found.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    found.add_argument("script", help="the script to run")
    found.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    found.set_defaults(command=command)


def command(chosen: argparse.Namespace) -> int:
    """Run the script; the status is the script's own, 1 if it raised, 2 if there is none."""
    if not chosen.module and not Path(chosen.script).is_file():
        sys.stderr.write(MSG_NO_SCRIPT.format(chosen.script))
        return 2
    recorder = Recorder()
    recorder.start()
    try:
        status = run_script(chosen.script, chosen.arguments, chosen.module)
    finally:
        recorder.stop()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    title = " ".join([Path(chosen.script).name, *chosen.arguments])
    show(recorder, console)
    Path(chosen.output).write_text(html_report.render(recorder, title), encoding="utf-8")
    console.print(f"report: {Path(chosen.output).resolve()}")
    return status


def run_script(script: str, arguments: list[str], module: bool) -> int:
    """Run a script in this process as ``python script`` would; its exit status."""
    former = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    try:
        if module:
            sys.path.insert(0, "")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        # the report of what ran so far may be what explains the error
        traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
        return 1
    finally:
        sys.argv, sys.path[:] = former
    return 0


def _of_script(found: TracebackType | None) -> TracebackType | None:
    """A traceback as ``python script`` would show it: without what ran the script."""
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        found = found.tb_next
    return found


def show(recorder: Recorder, console: Console) -> None:
    """Print the tables."""
    steps = recorder.steps
    console.rule(f"xla-debug: {len(steps)} steps in {recorder.seconds:.1f} s")
    if not steps:
        console.print("no step was run on an xla device (nothing called torch_xla.sync())")
        found = advice.advice(recorder)
        if found:
            _show_advice(found, "", console)
        return
    console.print(f"{recorder.startup:.1f} s of it before the script used the device")
    console.print(_parts_table(recorder))
    console.print(_causes_table(findings.causes(recorder)))
    spots = sorted(recorder.spots.values(), key=lambda s: -s.nanoseconds)
    if spots:
        table = _table("lines that made the host wait", "what", "times", "seconds", "line", "code")
        for spot in spots[:10]:
            row = (spot.label, str(spot.count), f"{spot.nanoseconds / 1e9:.3f}")
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


def _show_advice(found: list[Advice], note: str, console: Console) -> None:
    if found:
        console.print("change first:", style="bold")
    else:
        console.print("nothing stands out: no change would save 1 % of this run")
    for number, one in enumerate(found, 1):
        console.print(Text(f"{number}. {one.title} ({one.cost}) at {one.where}"))
        for line in filter(None, (one.code, one.how)):
            console.print(Padding(Text(line), (0, 0, 0, 3), expand=False))
    if note:
        console.print(Text(note))
