"""Finds faults of a script in its recorded run: one function for each kind of fault.

Each finding has its cost in this run. If there are several for one line, ``advice`` merges them into the one whose
function comes first in ``FINDERS``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from xla_core.extension_api.source_location import Frame
from xla_core.support.counters import render_bytes
from xla_debug.run_report.recorder import Recorder
from xla_debug.run_report.records import Run, Spot, Step, What
from xla_debug.steps.recompile_text import Cause, Explanation

# Causes of programs that every run needs: no change of the script would avoid them.
NORMAL: Final = (Cause.FIRST, Cause.NEW, Cause.OPTIMIZER)
# Causes for which two programs are normal: one for each mode of a model, or with and without earlier gradients.
_MODES: Final = 2
_TWO: Final = (Cause.MODE, Cause.GRADIENTS)
# A line reads often if it has at least this many reads per step, and this many in all.
_OFTEN: Final = 0.1
_FEW: Final = 3
# An unrolled loop is reported if it has at least this many rounds, and this share of its program's operations.
_ROUNDS: Final = 64
_SHARE: Final = 0.5
# Growth is reported if memory grew in this share of the later steps, of this many steps, by this many bytes in
# each.
_GROWING: Final = 0.8
_STEPS: Final = 16
_LEAKED: Final = 1 << 10


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault: its description, the line, the seconds that it cost, and what to write instead.

    ``cost`` describes costs other than time. A ``grave`` fault is reported however little time it costs.
    """

    title: str
    frame: Frame | None
    seconds: float
    how: str
    cost: str = ""
    grave: bool = False


@dataclasses.dataclass(frozen=True)
class CauseRow:
    """The programs that were made for one cause at one line: their number, their seconds, and one explanation."""

    cause: Cause
    where: str
    count: int
    seconds: float
    example: Explanation


def causes(recorder: Recorder) -> list[CauseRow]:
    """The programs of a run by cause and line, those that took longest first."""
    groups: defaultdict[tuple[Cause, str], list[Explanation]] = defaultdict(list)
    for explanation in recorder.explanations():
        groups[explanation.cause, explanation.where()].append(explanation)
    rows = [
        CauseRow(
            cause, where, len(explanations), sum(e.seconds for e in explanations), explanations[-1]
        )
        for (cause, where), explanations in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def is_normal(row: CauseRow) -> bool:
    """Whether every run needs these programs, so that no line is at fault."""
    return row.cause in NORMAL or (row.cause in _TWO and row.count <= _MODES)


def _runs(recorder: Recorder) -> list[Run]:
    unfinished = [recorder.unfinished] if recorder.unfinished is not None else []
    return [run for step in recorder.steps for run in step.runs] + unfinished


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# -- steps that are not ended, or ended too often -------------------------------------------------


def missing_sync(recorder: Recorder) -> Iterator[Finding]:
    """Several optimizer steps are in one program, because the script does not end them."""
    stuck = [run for run in _runs(recorder) if run.holds_several]
    marked = sum(step.ended is not None for step in recorder.steps)
    total = recorder.optimizer.total()
    if not stuck or total <= 2 * (marked + 1):
        return
    frame, _ = recorder.optimizer.most_common(1)[0]
    largest = max(run.operations for run in stuck)
    seconds = sum(run.nanoseconds for run in stuck) / 1e9
    if recorder.unfinished is not None and recorder.unfinished.holds_several:
        seconds += recorder.seconds - recorder.startup - sum(s.wall for s in recorder.steps) / 1e9
        became = f"{recorder.unfinished.operations} operations were recorded and never ran"
    else:
        became = f"{largest} operations became one program"
    yield Finding(
        f"{total} optimizer steps and {marked or 'no'} torch_xla.sync(): {became}",
        frame,
        seconds,
        "add torch_xla.sync() after this line: it ends the step, and every step runs the same small program.",
    )


def several_syncs(recorder: Recorder) -> Iterator[Finding]:
    """Calls of sync() cut each optimizer step into several programs."""
    between = recorder.optimizer_steps[1:-1]  # without the first and last, which are not complete
    if len(between) < _FEW:
        return
    counts = [Counter(syncs) for syncs in between]
    after_optimizer = Counter(syncs[0] for syncs in between if syncs)
    if not after_optimizer:
        return
    keep = after_optimizer.most_common(1)[0][0]  # the sync() that should end the step
    extra = [
        frame
        for frame in counts[0]
        if frame != keep and sum(syncs[frame] == 1 for syncs in counts) >= 0.8 * len(counts)
    ]
    if not extra:
        return
    spent = sum(run.nanoseconds for s in recorder.steps if s.ended in extra for run in s.runs)
    lines = ", ".join(str(frame.line) for frame in sorted(extra, key=lambda f: f.line))
    yield Finding(
        f"{len(extra) + 1} torch_xla.sync() in each optimizer step, {len(extra)} too many (line {lines})",
        min(extra, key=lambda frame: (frame.filename, frame.line)),
        spent / 1e9,
        f"keep the one in line {keep.line}, after the optimizer: then the step is one program, and the "
        "device gets all its work at once.",
    )


# -- lines that make the host wait ----------------------------------------------------------------

_HOW: Final = {
    What.CONDITION: "let the device decide: y = torch.where(condition, a, b) has both branches in one program.",
    What.PRINT: "print after torch_xla.sync(), every 100 steps, or with xm.add_step_closure(print, ...).",
}
_HOW_CUT: Final = (
    "read it after torch_xla.sync(), or add up on the device (total += loss.detach()) and read the sum "
    "at the end."
)
_HOW_READ: Final = (
    "collect tensors in a list (loss.detach()) and read torch.stack(list) every 100 steps, or use "
    "xm.add_step_closure."
)
_HOW_SIZE: Final = (
    ("nonzero", "use torch.where(mask, a, b), or the mask itself: its size is the same in each step."),
    ("unique", "count into a tensor of fixed size (torch.bincount(x, minlength=N)), or find them on the CPU, where "
     "the batch is made."),
    ("repeat_interleave", "give output_size=, or repeat on the CPU, where the batch is made."),
    ("", "use torch.where(mask, x, 0) instead of x[mask]: its size is the same in each step."),
)  # fmt: skip


def waits(recorder: Recorder) -> Iterator[Finding]:
    """Operators run on the CPU, or sizes or values are read in many steps."""
    fallbacks = {_line(s.frame) for s in recorder.spots.values() if s.what is What.FALLBACK}
    for spot in recorder.spots.values():
        if spot.what is What.FALLBACK:
            yield _of_fallback(spot)
        elif _line(spot.frame) not in fallbacks and _is_often(spot.count, recorder):
            yield _of_read(spot)


def _is_often(count: int, recorder: Recorder) -> bool:
    return count >= max(_FEW, _OFTEN * len(recorder.steps))


def _line(frame: Frame | None) -> tuple[str, int]:
    return (frame.filename, frame.line) if frame is not None else ("", 0)


def _of_fallback(spot: Spot) -> Finding:
    return Finding(
        f"{spot.operator} ran {_times(spot.count)} on the CPU",
        spot.frame,
        spot.nanoseconds / 1e9,
        "write it with operators that the device has, or call it outside the loop: each call runs the pending "
        "operations, copies its operands to the host, and its results back.",
    )


def _of_read(spot: Spot) -> Finding:
    times, in_step = _times(spot.count), " in the middle of a step" if spot.cuts else ""
    how = _HOW.get(spot.what) or (_HOW_CUT if spot.cuts else _HOW_READ)
    title = f"a value was read {times}{in_step}"
    if spot.what is What.SIZE:
        name = spot.operator.removeprefix("aten.").strip("_0123456789")
        title = f"the size of {name}'s result depends on the data: it was read {times}"
        how = next(text for part, text in _HOW_SIZE if part in spot.operator)
    elif spot.what is What.CONDITION:
        title = f"Python waited for a value {times} to take a branch"
    elif spot.what is What.PRINT:
        title = f"a tensor was printed {times}{in_step}"
    return Finding(title, spot.frame, spot.nanoseconds / 1e9, how)


def sent_again(recorder: Recorder) -> Iterator[Finding]:
    """One line sends the same values to the device in many steps."""
    lines: defaultdict[Frame | None, list[tuple[int, int, int]]] = defaultdict(list)
    for sent in recorder.sent.values():
        if _is_often(sent.count, recorder):
            lines[sent.frame].append((sent.count, sent.nbytes * sent.count, sent.nanoseconds))
    for frame, columns in lines.items():
        count, nbytes, spent = (sum(column) for column in zip(*columns, strict=True))
        yield Finding(
            f"the same values were sent to the device {_times(count)}",
            frame,
            spent / 1e9,
            'send them once, before the loop (x = x.to("xla")), and use that tensor.',
            f"{render_bytes(nbytes)} in all",
        )


def data(recorder: Recorder) -> Iterator[Finding]:
    """The loop waits for its data loader."""
    for frame, spent in recorder.loaders.items():
        yield Finding(
            "the loop waits for data",
            frame,
            spent / 1e9,
            "use DataLoader's num_workers=, prepare batches once, or use MpDeviceLoader.",
        )


# -- programs -------------------------------------------------------------------------------------


def compilations(recorder: Recorder) -> Iterator[Finding]:
    """Programs were made that a change of the script would avoid."""
    for row in causes(recorder):
        if not is_normal(row):
            frames = row.example.frames
            yield Finding(
                f"{row.count} program{'s' * (row.count > 1)} compiled: {row.cause.value}",
                frames[0] if frames else None,
                row.seconds,
                f"{row.example.text}. Advice: {row.example.advice}.",
            )


def unrolled(recorder: Recorder) -> Iterator[Finding]:
    """A loop makes up most of a program, which takes long to compile."""
    by_line: defaultdict[Frame, list[Run]] = defaultdict(list)
    for run in _runs(recorder):
        loop = run.loop
        if loop is not None and _is_unrolled(run):
            by_line[loop.line].append(run)
    for line, runs in by_line.items():
        loops = [run.loop for run in runs if run.loop is not None]
        most = max(loops, key=lambda loop: loop.rounds)
        yield Finding(
            f"a loop of {most.rounds} rounds is {most.operations} of {round(most.operations / most.share)} "
            "operations of a program",
            line,
            sum(run.compiling * loop.share for run, loop in zip(runs, loops, strict=True)) / 1e9,
            "torch_xla.experimental.scan.scan(f, init, xs) compiles and records one round; for equal layers there "
            "is scan_layers.",
        )


def _is_unrolled(run: Run) -> bool:
    loop = run.loop
    if loop is None or run.holds_several:  # those are rounds of the loop over the steps
        return False
    return loop.rounds >= _ROUNDS and loop.share >= _SHARE


def normal_programs(recorder: Recorder) -> list[Explanation]:
    """The programs that every run of the script needs, and no finding blames."""
    normal = {row.cause for row in causes(recorder) if is_normal(row)}
    blamed = {run.program for run in _runs(recorder) if run.holds_several or _is_unrolled(run)}
    return [e for e in recorder.explanations() if e.cause in normal and e.program not in blamed]


# -- memory ---------------------------------------------------------------------------------------


def growth(recorder: Recorder) -> Iterator[Finding]:
    """Memory that grows with each step, and the lines whose values live on."""
    steps = [s for s in recorder.steps if s.memory is not None]
    late = steps[len(steps) // 2 :]
    if len(steps) < _STEPS or not recorder.births.survivors:
        return
    grown = [_memory(b) - _memory(a) for a, b in itertools.pairwise(late)]
    each = sum(grown) / len(grown)
    if each < _LEAKED or sum(more > 0 for more in grown) < _GROWING * len(grown):
        return
    worst = max(recorder.births.survivors, key=lambda s: s.nbytes)
    yield Finding(
        f"device memory grows by {render_bytes(round(each))} in each step: values that are made here live on",
        worst.frame,
        0.0,
        "keep numbers, not graphs: append loss.detach() (or .item() every 100 steps), and evaluate under "
        "torch.no_grad().",
        f"{render_bytes(_memory(steps[-1]) - _memory(steps[0]))} more after the last step",
        grave=True,
    )


def _memory(step: Step) -> int:
    return step.memory or 0


FINDERS: Final[tuple[Callable[[Recorder], Iterator[Finding]], ...]] = (
    missing_sync,
    waits,
    several_syncs,
    unrolled,
    sent_again,
    compilations,
    data,
    growth,
)
"""The kinds of faults; of several at one line the first gives its words."""
