"""Profiles for Perfetto: adds rows of modules and operators below each device row of the runtime's profile.

The runtime names its events after the compiled program's instructions (``fusion.3``). TensorBoard's profile plugin
derives rows of modules and operators from the program's metadata. Perfetto does not, so that the rows are written
into its file: one slice for each module, inside it one for each submodule, and inside these the operators, at the
times of their instructions.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import JsonObject
from xla_core.extension_api import programs

ROW: Final = "{}: modules and operators"
"""The name of the derived row below a device's row."""

_INSTRUCTION: Final = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', re.M)
_OPERATOR: Final = re.compile(r"^\w+\.\w+(\.\w+)?$")
_BACKWARD: Final = "backward"

Event = JsonObject


def instruction_scopes(hlo: str) -> dict[str, str]:
    """The scopes in the metadata of a compiled module's instructions, by the names of the instructions.

    For example ``{"dot.3": "Net/fc1/aten.mm.default/dot_general"}``. The name of the program is left out.
    """
    return {name: scope.partition("/")[2] or scope for name, scope in _INSTRUCTION.findall(hlo)}


def levels(scope: str) -> tuple[str, ...]:
    """The modules of a scope, outermost first, and its operator, without jax's primitives inside the operator.

    ``"Net/fc1/aten.mm.default/dot_general"`` has ``("Net", "fc1", "aten.mm.default")``.
    """
    parts = scope.split("/")
    operators = [
        i for i, part in enumerate(parts) if _OPERATOR.match(part) and not part[0].isdigit()
    ]
    last = next((i for i in operators if parts[i].startswith(("aten.", "xla."))), None)
    return tuple(parts[: last + 1] if last is not None else parts[:-1])


def add_scopes(path: Path) -> None:
    """Add scopes, and the rows derived from them, to a ``.trace.json.gz`` file.

    Removes the metadata block, which Perfetto's JSON reader refuses.
    """
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    events = content.get("traceEvents", [])
    events.extend(_rows(events, _label(events)))
    content.pop("metadata", None)
    with gzip.open(path, "wt") as file:
        json.dump(content, file)


def _label(events: Iterable[Event]) -> dict[tuple[int, int], list[Event]]:
    """Add scope and operator to the device events that have one, and return these by process and thread."""
    by_name = {p.name: p for p in programs.all_programs()}
    scopes: dict[str, Mapping[str, str]] = {}
    by_row: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        arguments = event.get("args") or {}
        module = arguments.get("hlo_module")
        if module not in by_name:
            continue
        if module not in scopes:
            scopes[module] = instruction_scopes(by_name[module].executable.optimized_hlo())
        scope = scopes[module].get(arguments.get("hlo_op", ""))
        if scope:
            arguments["scope"] = scope
            arguments["operator"] = levels(scope)[-1] if levels(scope) else scope
            by_row[event["pid"], event["tid"]].append(event)
    return by_row


def _rows(events: Iterable[Event], labelled: dict[tuple[int, int], list[Event]]) -> list[Event]:
    """The events of a row for each thread with labelled events: name, place below the thread, and slices."""
    metadata = {
        (e["pid"], e["tid"], e["name"]): e["args"] for e in events if "tid" in e and e["ph"] == "M"
    }
    used = {e["tid"] for e in events if "tid" in e}
    rows: list[Event] = []
    for (pid, tid), slices in labelled.items():
        row = max(used) + 1
        used.add(row)
        thread = metadata.get((pid, tid, "thread_name"), {"name": tid})["name"]
        order = metadata.get((pid, tid, "thread_sort_index"), {"sort_index": tid})
        of_row = {"thread_name": {"name": ROW.format(thread)}, "thread_sort_index": order}
        rows += [
            {"ph": "M", "pid": pid, "tid": row, "name": n, "args": a} for n, a in of_row.items()
        ]
        rows += [{**slice_, "pid": pid, "tid": row} for slice_ in _slices(slices)]
    return rows


def _slices(events: list[Event]) -> list[Event]:
    """Nested slices, outer ones first. Consecutive events of the same module, or operator, share a slice."""
    slices: list[Event] = []
    stack: list[Event] = []
    covered, run = float("-inf"), None
    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0))):
        begin, end = event["ts"], event["ts"] + event.get("dur", 0)
        if begin < covered:  # an instruction inside another one, which has a slice already
            continue
        covered = end
        if event["args"].get("run_id") != run:
            run = event["args"].get("run_id")
            stack.clear()
        path = levels(event["args"]["scope"])
        shared = 0
        while shared < min(len(stack), len(path)) and stack[shared]["name"] == path[shared]:
            shared += 1
        del stack[shared:]
        stack += [{"ph": "X", "name": name, "ts": begin, "dur": 0.0} for name in path[shared:]]
        slices += stack[shared:]
        for level in stack:
            level["dur"] = end - level["ts"]
    return slices
