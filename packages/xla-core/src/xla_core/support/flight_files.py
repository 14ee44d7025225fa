"""The flight recorder's files: a folder per job and occasion, a file per process, and one of them all.

``FOLDER/JOB/OCCASION/3.json`` is what process 3 wrote, ``3.last.json`` what others knew of it, ``job.json`` all of
them, ``job.txt`` the page. Who writes last merges: no process has to outlive the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import JsonObject
from xla_core.support import flags, flight_report

__all__ = [
    "END",
    "KEPT_JOBS",
    "MERGED",
    "PAGE",
    "RUNNING",
    "conclude",
    "folder",
    "forget",
    "keep",
    "merged",
    "occasions",
    "prune",
    "write",
]

END: Final = "end"
"""The occasion of a job's end."""
MERGED: Final = "job.json"
PAGE: Final = "job.txt"
RUNNING: Final = "running"
"""The occasion of processes that run, or were aborted."""
KEPT_JOBS: Final = 20
"""The number of jobs whose folders stay; older ones are removed."""
_LOCK: Final = ".lock"
_LAST: Final = ".last.json"

MSG_FOREIGN: Final = "{folder} belongs to another user; set XLA_FLIGHT_DIR to a folder of your own"

_Snapshot = JsonObject
"""What one process says of itself: see ``flight_report``."""


def folder() -> Path:
    """Where reports are: ``XLA_FLIGHT_DIR``, or a folder of this user's among the temporary files."""
    named = flags.FLIGHT_DIR.get()
    return Path(named) if named else Path(tempfile.gettempdir()) / f"xla-flight-{os.getuid()}"


def write(job: str, occasion: str, snapshot: _Snapshot, others: dict[int, _Snapshot]) -> Path:
    """Keep this process's ``snapshot``, and what is known of ``others`` by ordinal; returns the page's path.

    The job's file and page are made again from all parts. Raises OSError where the folder cannot be
    written to.
    """
    place = _made(job, occasion)
    with _locked(place):
        _replace(place / f"{snapshot['ordinal']}.json", json.dumps(snapshot))
        for ordinal, known in others.items():
            if ordinal != snapshot["ordinal"]:
                _replace(place / f"{ordinal}{_LAST}", json.dumps(known))
        _write_merged(place)
    prune(place.parents[1])
    return place / PAGE


def _made(job: str, occasion: str) -> Path:
    """An occasion's folder, for this user alone."""
    base = folder()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise PermissionError(MSG_FOREIGN.format(folder=base))
    place = base / job / occasion
    place.mkdir(parents=True, exist_ok=True)
    return place


def keep(job: str, snapshot: _Snapshot) -> None:
    """Keep what this process did last while it runs: it may be aborted without another word."""
    _replace(_made(job, RUNNING) / f"{snapshot['ordinal']}.json", json.dumps(snapshot))


def forget(job: str, ordinal: int) -> None:
    """This process ends well, or has said more: remove what ``keep`` has kept."""
    place = folder() / job / RUNNING
    (place / f"{ordinal}.json").unlink(missing_ok=True)
    for empty in (place, place.parent):  # the last one out
        with contextlib.suppress(OSError):
            empty.rmdir()


def conclude(job: str, occasion: str, reason: str) -> Path | None:
    """A report of what ``keep`` has kept of processes that were aborted; the page's path, or None if there is one.

    For who outlives all of them: ``reason`` is why it is written.
    """
    running, place = folder() / job / RUNNING, _made(job, occasion)
    with _locked(place):
        if (place / MERGED).exists():
            return None
        kept = list(running.glob("[0-9]*.json"))
        for path in kept:
            snapshot = {**json.loads(path.read_text()), "reason": reason}
            # as what others knew of it: it did not say so itself
            _replace(place / f"{snapshot['ordinal']}{_LAST}", json.dumps(snapshot))
        _write_merged(place)
        for path in kept:  # only now: who finds no such file looks for a page, and waits no longer
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        running.rmdir()
    prune(place.parents[1])
    return place / PAGE


def merged(place: Path) -> JsonObject:
    """The report of an occasion's folder, made anew where the job runs or was aborted.

    Raises OSError where there is none.
    """
    if place.name == RUNNING:
        report = _merge(place)
        for one in report["processes"].values():
            one["heard"] = True  # it is not known whether it is still alive
        return report
    report_of_all: dict[str, object] = json.loads((place / MERGED).read_text())
    return report_of_all


def occasions() -> list[Path]:
    """The folders of all reports, the latest last."""
    folders = {path.parent for path in folder().glob("*/*/[0-9]*.json")}
    # what a killed process of a job has left is in the report of that job's end
    over = {place.parent for place in folders if place.name == END and (place / MERGED).exists()}
    folders = {place for place in folders if place.name != RUNNING or place.parent not in over}
    return sorted(folders, key=lambda place: place.stat().st_mtime)


def _write_merged(place: Path) -> None:
    report = _merge(place)
    _replace(place / MERGED, json.dumps(report))
    _replace(place / PAGE, flight_report.text(report))


def prune(base: Path) -> None:
    """Remove the folders of the oldest jobs."""
    jobs = [path for path in base.iterdir() if path.is_dir()]
    if len(jobs) > KEPT_JOBS:
        jobs.sort(key=lambda path: path.stat().st_mtime if path.exists() else 0.0)
        for path in jobs[:-KEPT_JOBS]:
            shutil.rmtree(path, ignore_errors=True)


def _merge(place: Path) -> JsonObject:
    """One report of all files: of each process the one that it wrote, or else what others knew of it."""
    snapshots: dict[int, _Snapshot] = {}
    for path in sorted(place.glob("[0-9]*.json")):  # "3.json" before "3.last.json"
        snapshot = json.loads(path.read_text())
        snapshot["heard"] = path.name.endswith(_LAST)
        ordinal = int(path.name.partition(".")[0])
        snapshots.setdefault(ordinal, snapshot)
    first = min(snapshots.values(), key=lambda s: (s["heard"], s["time"]))
    return {
        "job": place.parent.name,
        "occasion": place.name,
        "count": first["count"],
        "processes": {str(n): snapshots[n] for n in sorted(snapshots)},
    }


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One process at a time; the system lets go of it for one that dies meanwhile."""
    with (place / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, for who reads meanwhile; not waited for until it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
