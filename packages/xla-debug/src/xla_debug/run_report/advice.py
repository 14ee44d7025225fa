"""What a recorded run shows: totals, and the things to change first."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Final

from xla_core.extension_api.source_location import Frame
from xla_debug.run_report.recorder import PARTS, Recorder
from xla_debug.stacks import stack_frames
from xla_debug.steps.recompile_text import Cause, Explanation, advice_for

# A program that is made once per run is no loss that a change of the script could avoid.
NORMAL: Final = (Cause.FIRST, Cause.NEW, Cause.OPTIMIZER)
# Less than this part of the run, and a change is not worth proposing.
WORTH: Final = 0.01
SHOWN: Final = 3
# Reads of values, per step, that are more than a report now and then.
OFTEN: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to change: what, where (and the code there), the seconds it cost, and how."""

    title: str
    where: str
    seconds: float
    how: str
    code: str = ""


@dataclasses.dataclass(frozen=True)
class CauseRow:
    """Programs made for one cause at one line."""

    cause: Cause
    where: str
    count: int
    seconds: float
    example: Explanation


def totals(recorder: Recorder) -> dict[str, float]:
    """Seconds by part over all steps."""
    summed: Counter[str] = Counter()
    for step in recorder.steps:
        summed.update(step.parts)
    return {part: summed[part] / 1e9 for part in PARTS}


def steady(recorder: Recorder) -> dict[str, float]:
    """Mean milliseconds by part over the steps that compiled nothing; empty if all did."""
    quiet = [s for s in recorder.steps if not s.compilations]
    if not quiet:
        return {}
    return {part: sum(s.parts[part] for s in quiet) / len(quiet) / 1e6 for part in PARTS}


def causes(recorder: Recorder) -> list[CauseRow]:
    """Compilations by cause and line, the most expensive first."""
    groups: defaultdict[tuple[Cause, str], list[Explanation]] = defaultdict(list)
    for explanation in recorder.explanations():
        groups[explanation.cause, explanation.where()].append(explanation)
    rows = [
        CauseRow(cause, where, len(found), sum(e.seconds for e in found), found[-1])
        for (cause, where), found in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def place(frame: Frame | None) -> str:
    """``train.py:34``."""
    return f"{frame.filename}:{frame.line}" if frame is not None else "(line unknown)"


def code(frame: Frame | None) -> str:
    """The text of a line, empty where it is not known."""
    return stack_frames.source(frame) if frame is not None else ""


def advice(recorder: Recorder) -> list[Advice]:
    """The changes that would save most, at most three; empty where nothing stands out."""
    found = [*_of_compilations(recorder), *_of_spots(recorder), *_of_data(recorder)]
    found += _of_first_compilations(recorder)
    least = WORTH * recorder.seconds
    worth = sorted((a for a in found if a.seconds > least), key=lambda a: -a.seconds)
    return worth[:SHOWN]


def _of_compilations(recorder: Recorder) -> list[Advice]:
    return [
        Advice(
            f"{row.count} program{'s' * (row.count > 1)} compiled: {row.cause.value}",
            row.where,
            row.seconds,
            f"{row.example.text}. Mend: {advice_for(row.cause)}.",
            row.example.code,
        )
        for row in causes(recorder)
        if row.cause not in NORMAL
    ]


def _of_spots(recorder: Recorder) -> list[Advice]:
    found = []
    for spot in recorder.spots.values():
        seconds = spot.nanoseconds / 1e9
        if spot.what.startswith("value"):
            if spot.count < OFTEN * len(recorder.steps):
                continue
            title = f"{spot.count} values read while the device was working"
            how = "read rarely: collect tensors in a list and stack them at the end of the epoch"
        else:
            title = f"{spot.what} ran {spot.count} times on the CPU"
            how = "replace the operator by ones that the device has, or move it out of the loop"
        found.append(Advice(title, place(spot.frame), seconds, how + ".", code(spot.frame)))
    return found


def _of_data(recorder: Recorder) -> list[Advice]:
    return [
        Advice(
            "the loop waits for data",
            "DataLoader",
            totals(recorder)["data"],
            "give the DataLoader workers (num_workers=), prepare batches once, or use MpDeviceLoader.",
        )
    ]


def _of_first_compilations(recorder: Recorder) -> list[Advice]:
    made = [e for e in recorder.explanations() if e.cause in NORMAL and not e.from_cache]
    return (
        [
            Advice(
                f"{len(made)} programs that every run needs were compiled",
                "first steps",
                sum(e.seconds for e in made),
                "keep them for the next run: XLA_PERSISTENT_CACHE_PATH=DIR, or xr.initialize_cache(DIR).",
            )
        ]
        if made
        else []
    )
