"""``xla-debug run``: runs a script, and reports where its time went as tables and as an HTML page."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from rich.console import Console

from xla_debug import tracebacks
from xla_debug.run_report import html_report, terminal
from xla_debug.run_report.recorder import Recorder

MSG_NO_SCRIPT: Final = "xla-debug run: {} is not a file; name a script, or a module with -m\n"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    run = commands.add_parser(
        "run", help="run a script, then say where its time went and what to change first"
    )
    run.add_argument("-o", "--output", default="xla-debug.html", help="the HTML page (%(default)s)")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script", help="the script to run")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    run.set_defaults(command=command)


def command(chosen: argparse.Namespace) -> int:
    """Run the script and report. Returns the script's exit status: 1 if it raised, 2 if there is no such script."""
    if not chosen.module and not Path(chosen.script).is_file():
        sys.stderr.write(MSG_NO_SCRIPT.format(chosen.script))
        return 2
    recorder = Recorder()
    recorder.start()
    try:
        status = run_script(chosen.script, chosen.arguments, chosen.module)
    finally:
        recorder.stop()
    console = Console(width=None if sys.stdout.isatty() else terminal.WIDTH, highlight=False)
    title = " ".join([Path(chosen.script).name, *chosen.arguments])
    terminal.show(recorder, console)
    Path(chosen.output).write_text(html_report.render(recorder, title), encoding="utf-8")
    console.print(f"report: {Path(chosen.output).resolve()}")
    return status


def run_script(script: str, arguments: list[str], module: bool) -> int:
    """Run a script in this process, in the same way as ``python script``, and return its exit status."""
    before = sys.argv, list(sys.path)
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
        # print the error and go on: the report of what ran so far may explain it
        raised = error.with_traceback(_of_script(error.__traceback__))
        traceback.print_exception(tracebacks.shorten(raised))
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that ran the script, as ``python script`` would show it."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
