"""``xla-debug flight``: shows what each process of a job did last, while it runs or after it has ended."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from xla_core.support import flight_files, flight_report
from xla_debug.run_report import flight_page

HTML: Final = "job.html"
SIGNAL: Final = signal.SIGUSR2
WAIT_SECONDS: Final = 10.0
_PAUSE: Final = 0.1
_SETTLED_SECONDS: Final = 1.5
"""After this time, a report has all processes that can answer."""

MSG_NONE: Final = "no reports in {folder} (XLA_FLIGHT_DIR)\n"
MSG_UNKNOWN: Final = "there is no report of {job} in {folder}; `xla-debug flight` lists them\n"
MSG_NO_PROCESS: Final = (
    "process {pid}, and those that it started, do not answer: they do not use an xla device with xla-dist, "
    "or belong to another user or host\n"
)
MSG_SILENT: Final = "process {pid} has written no report within {seconds:.0f} s\n"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    flight = commands.add_parser(
        "flight", help="show what each process of a job did last, and who waits for whom"
    )
    flight.add_argument(
        "job",
        nargs="?",
        help="a process of a running job, or its launcher, by number; or a report's job or folder; "
        "default: list the reports",
    )
    flight.set_defaults(command=command)


def command(chosen: argparse.Namespace) -> int:
    """Show a report, or the list of reports. Returns 1 if there is none, else 0."""
    if chosen.job is None:
        return _list()
    if chosen.job.isdecimal():
        return _ask(int(chosen.job))
    place = _find(chosen.job)
    if place is None:
        text = MSG_UNKNOWN.format(job=chosen.job, folder=flight_files.folder())
        sys.stderr.write(text)
        return 1
    return _show(place)


def _list() -> int:
    places = flight_files.occasions()
    if not places:
        sys.stderr.write(MSG_NONE.format(folder=flight_files.folder()))
        return 1
    for place in places:
        sys.stdout.write(f"{place.parent.name}/{place.name}\n")
        for line in flight_report.headline(flight_files.merged(place)):
            sys.stdout.write(f"    {line}\n")
    return 0


def _find(name: str) -> Path | None:
    """The latest report of the job called ``name``, or the report in the folder ``name``."""
    path = Path(name)
    for place in reversed(flight_files.occasions()):
        if name in (place.parent.name, f"{place.parent.name}/{place.name}") or (
            path.exists() and place.resolve() in (path.resolve(), path.resolve().parent)
        ):
            return place
    return None


def _show(place: Path) -> int:
    report = flight_files.merged(place)
    sys.stdout.write(flight_report.text(report))
    page = place / HTML
    page.write_text(flight_page.render(report), encoding="utf-8")
    sys.stdout.write(f"page: {page}\n")
    return 0


def _ask(pid: int) -> int:
    """Let a process write a report of its job, and show it."""
    asked = time.time()
    family = [pid, *_descendants(pid)]
    answering = next((p for p in family if _answers(p) and _is_signalled(p)), None)
    if answering is None:
        sys.stderr.write(MSG_NO_PROCESS.format(pid=pid))
        return 1
    while time.time() - asked < WAIT_SECONDS:
        for place in reversed(flight_files.occasions()):
            if place.name != flight_files.RUNNING and _is_answer(place, answering, asked):
                return _show(place)
        time.sleep(_PAUSE)
    sys.stderr.write(MSG_SILENT.format(pid=answering, seconds=WAIT_SECONDS))
    return 1


def _is_answer(place: Path, pid: int, asked: float) -> bool:
    """Whether a report is the complete answer of the job of process ``pid``, which was asked at time ``asked``."""
    try:
        report = flight_files.merged(place)
    except OSError:
        return False  # it is being written
    processes = report["processes"].values()
    fresh = [one for one in processes if not one["heard"] and one["time"] >= asked]
    if not any(one["pid"] == pid for one in fresh):
        return False
    return len(fresh) == report["count"] or time.time() - fresh[0]["time"] > _SETTLED_SECONDS


def _answers(pid: int) -> bool:
    """Whether a process handles the signal, which would otherwise end it; see proc_pid_status(5)."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((row for row in text.splitlines() if row.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)


def _is_signalled(pid: int) -> bool:
    """Send the signal to a process. Returns False if it belongs to another user, or has ended meanwhile."""
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and their descendants."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        parents[int(path.parent.name)] = int(words[1])
    family = [pid]
    for member in family:  # the loop also visits the members that it adds
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]
