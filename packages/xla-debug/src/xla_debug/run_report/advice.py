"""Summarizes a recorded run: totals, and the changes that would save most time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Final

from xla_core.extension_api.source_location import Frame
from xla_debug.run_report import findings
from xla_debug.run_report.findings import Finding
from xla_debug.run_report.recorder import Recorder
from xla_debug.run_report.records import PARTS
from xla_debug.stacks import stack_frames

# A change that saves less than this part of the run is not proposed.
WORTH: Final = 0.01
SHOWN: Final = 3


@dataclasses.dataclass(frozen=True)
class Advice:
    """One change to make: ``title`` names the fault, ``where`` and ``code`` the line, and ``how`` what to write.

    ``seconds`` is the time that it cost, and ``cost`` describes all its costs.
    """

    title: str
    where: str
    seconds: float
    how: str
    code: str
    cost: str


def totals(recorder: Recorder) -> dict[str, float]:
    """The seconds of each part, over all steps."""
    summed: Counter[str] = Counter()
    for step in recorder.steps:
        summed.update(step.parts)
    return {part: summed[part] / 1e9 for part in PARTS}


def steady(recorder: Recorder) -> dict[str, float]:
    """The mean milliseconds of each part, over the steps that compiled nothing; empty if there are none."""
    quiet = [s for s in recorder.steps if not s.compilations]
    if not quiet:
        return {}
    return {part: sum(s.parts[part] for s in quiet) / len(quiet) / 1e6 for part in PARTS}


def place(frame: Frame | None) -> str:
    """File and line of a frame, as ``train.py:34``."""
    return f"{frame.filename}:{frame.line}" if frame is not None else "(line unknown)"


def code(frame: Frame | None) -> str:
    """The text of a frame's line; empty if it is not known."""
    return stack_frames.source(frame) if frame is not None else ""


def advice(recorder: Recorder) -> list[Advice]:
    """The changes that would save most time or memory, at most three; empty if there are none worth making."""
    merged = _by_line([f for find in findings.FINDERS for f in find(recorder)])
    least = WORTH * (recorder.seconds - recorder.startup)
    worth = [f for f in merged if f.seconds > least or f.grave]
    return [_advice(f) for f in sorted(worth, key=lambda f: -f.seconds)[:SHOWN]]


def _by_line(all_findings: list[Finding]) -> list[Finding]:
    """One finding for each line: the first one, with the time of all findings of the line."""
    by_line: dict[tuple[str, int] | str, Finding] = {}
    for finding in all_findings:
        frame = finding.frame
        key = (frame.filename, frame.line) if frame is not None else finding.title
        first = by_line.get(key)
        if first is None:
            by_line[key] = finding
        else:
            by_line[key] = dataclasses.replace(first, seconds=first.seconds + finding.seconds)
    return list(by_line.values())


def _advice(finding: Finding) -> Advice:
    seconds = seconds_text(finding.seconds) if finding.seconds else ""
    cost = ", ".join(filter(None, (seconds, finding.cost)))
    return Advice(
        finding.title, place(finding.frame), finding.seconds, finding.how, code(finding.frame), cost
    )


def seconds_text(seconds: float) -> str:
    """A time as ``0.25 s``, or in milliseconds if it is below a tenth of a second."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def note(recorder: Recorder) -> str:
    """The cost of the programs that every run needs, and how the next run avoids it; empty if there are none."""
    new = [e for e in findings.normal_programs(recorder) if not e.from_cache]
    if not new:
        return ""
    took = seconds_text(sum(e.seconds for e in new))
    return (
        f"{len(new)} program{'s' * (len(new) > 1)} that every run needs took {took}; the next run has them at "
        "once with XLA_PERSISTENT_CACHE_PATH=DIR, or xr.initialize_cache(DIR)."
    )
