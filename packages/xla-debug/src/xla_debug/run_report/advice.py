"""What a recorded run shows: totals, and the things to change first."""

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

# Less than this part of the run, and a change is not worth proposing.
WORTH: Final = 0.01
SHOWN: Final = 3


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to change: what, where (and the code there), the seconds it cost, and how.

    ``cost`` is the cost in words.
    """

    title: str
    where: str
    seconds: float
    how: str
    code: str
    cost: str


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


def place(frame: Frame | None) -> str:
    """``train.py:34``."""
    return f"{frame.filename}:{frame.line}" if frame is not None else "(line unknown)"


def code(frame: Frame | None) -> str:
    """The text of a line, empty where it is not known."""
    return stack_frames.source(frame) if frame is not None else ""


def advice(recorder: Recorder) -> list[Advice]:
    """The changes that would save most time, at most three, then what fills the memory; empty if none would."""
    merged = _by_line([f for find in findings.FINDERS for f in find(recorder)])
    least = WORTH * (recorder.seconds - recorder.startup)
    worth = [f for f in merged if f.seconds > least or f.grave]
    return [_advice(f) for f in sorted(worth, key=lambda f: -f.seconds)[:SHOWN]]


def _by_line(all_findings: list[Finding]) -> list[Finding]:
    """One finding for each line, in the words of the first; their costs are one sum."""
    lines: dict[tuple[str, int] | str, Finding] = {}
    for one in all_findings:
        key = (one.frame.filename, one.frame.line) if one.frame is not None else one.title
        known = lines.get(key)
        if known is None:
            lines[key] = one
        else:
            lines[key] = dataclasses.replace(known, seconds=known.seconds + one.seconds)
    return list(lines.values())


def _advice(finding: Finding) -> Advice:
    seconds = seconds_text(finding.seconds) if finding.seconds else ""
    cost = ", ".join(filter(None, (seconds, finding.cost)))
    return Advice(
        finding.title, place(finding.frame), finding.seconds, finding.how, code(finding.frame), cost
    )


def seconds_text(seconds: float) -> str:
    """``0.25 s``; less than a tenth of a second in milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def note(recorder: Recorder) -> str:
    """What the programs cost that every run needs, and how the next one has them; empty if there are none."""
    new = [e for e in findings.normal_programs(recorder) if not e.from_cache]
    if not new:
        return ""
    took = seconds_text(sum(e.seconds for e in new))
    return (
        f"{len(new)} program{'s' * (len(new) > 1)} that every run needs took {took}; the next run has them at "
        "once with XLA_PERSISTENT_CACHE_PATH=DIR, or xr.initialize_cache(DIR)."
    )
