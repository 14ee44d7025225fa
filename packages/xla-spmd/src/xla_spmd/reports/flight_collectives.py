"""Tells the flight recorder which collectives each partitioned program has, once, when the program is created."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Final

from xla_core.contract import events
from xla_core.contract.foreign_values import JsonObject
from xla_core.support import flight_ring
from xla_core.support.once import Once
from xla_spmd.lowering.mesh_backend import MeshBackend
from xla_spmd.reports.program_report import collectives_in

MOST_ROWS: Final = 16
"""The most rows that are recorded of one program: those with the most bytes."""
_GROUPS: Final = re.compile(r"(?:replica_groups|source_target_pairs)=(?P<text>.*?)(?=, [a-z_]+=|$)")
_FRAME: Final = re.compile(r"stack_frame_id=(\d+)")
_PLACE: Final = re.compile(r'source_file="(?P<file>[^"]*)" source_line=(?P<line>\d+)')
_OPERATOR: Final = re.compile(r'op_name="[^"]*?(?P<name>\w+\.\w+\.\w+)[^"]*"')
_FILE: Final = re.compile(r'^(?P<number>\d+) "(?P<name>.*)"$', re.MULTILINE)
_LOCATION: Final = re.compile(
    r"^(?P<number>\d+) \{file_name_id=(?P<file>\d+) .*?\bline=(?P<line>\d+)", re.MULTILINE
)
_STACK: Final = re.compile(r"^(?P<number>\d+) \{file_location_id=(?P<location>\d+)", re.MULTILINE)

_begun: Final = Once()


def begin() -> None:
    """From now on, tell the flight recorder about each program over several devices. Later calls do nothing."""
    if not _begun.begin():
        return
    events.subscribe(events.ProgramCompiled, _on_program)
    events.subscribe(events.ProgramLoaded, _on_program)


def _on_program(event: events.ProgramCompiled | events.ProgramLoaded) -> None:
    backend = event.trace.backend
    if isinstance(backend, MeshBackend) and len(backend.devices) > 1:
        rows = rows_of(event.program.executable.optimized_hlo())
        flight_ring.tell_program(event.program.name, rows)


def rows_of(hlo: str) -> list[dict[str, object]]:
    """The collectives of a compiled module, as rows for the flight recorder: those with the most bytes first.

    Collectives of the same kind, groups and line share a row, with ``kind``, ``count``, ``bytes`` (of all of them,
    on one device), ``groups`` as HLO writes them, and ``line``: file and line of the user's program if they are
    known, else the operator, else an empty text.
    """
    lines = _lines_of_frames(hlo)
    texts = {collective.name: collective for collective in collectives_in(hlo)}
    rows: dict[tuple[str, str, str], JsonObject] = {}
    for name, text in _instructions(hlo, texts):
        groups = _GROUPS.search(text)
        key = texts[name].kind, groups["text"] if groups else "", _place(text, lines)
        empty = {"kind": key[0], "count": 0, "bytes": 0, "groups": key[1], "line": key[2]}
        row = rows.setdefault(key, empty)
        row["count"] += 1
        row["bytes"] += texts[name].bytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])[:MOST_ROWS]


def _instructions(hlo: str, names: Container[str]) -> Iterator[tuple[str, str]]:
    """Name and line of each instruction that has one of ``names``."""
    for line in hlo.splitlines():
        name = line.strip().removeprefix("ROOT ").partition(" = ")[0].removeprefix("%")
        if name in names:
            yield name, line


def _lines_of_frames(hlo: str) -> dict[str, str]:
    """The place (``file.py:12``) of each stack frame by its number, from the tables at the head of a module."""
    head = hlo.partition("\n%")[0]
    files, _, rest = head.partition("FileLocations")
    locations, _, frames = rest.partition("StackFrames")
    files = files.partition("FunctionNames")[0]
    names = {match["number"]: match["name"] for match in _FILE.finditer(files)}
    places = {
        match["number"]: f"{names.get(match['file'], '')}:{match['line']}"
        for match in _LOCATION.finditer(locations)
    }
    return {match["number"]: places.get(match["location"], "") for match in _STACK.finditer(frames)}


def _place(text: str, lines: dict[str, str]) -> str:
    """The place from which an instruction comes: newer compilers refer to a table of frames, older ones name it."""
    frame = _FRAME.search(text)
    if frame is not None and lines.get(frame[1]):
        return lines[frame[1]]
    place = _PLACE.search(text)
    if place is not None:
        return f"{place['file']}:{place['line']}"
    operator = _OPERATOR.search(text)
    return operator["name"] if operator is not None else ""
