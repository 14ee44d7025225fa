"""Explains why programs are compiled, by comparing each new program with the most similar known one.

Nothing runs for operations, or for steps that repeat: the comparison is made only when a program is missing, and
compiling it takes far longer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from xla_core.extension_api import programs, runtime
from xla_core.extension_api.source_location import Frame, SourceLocation
from xla_core.extension_api.steps import Entry, Trace, operations_of
from xla_core.support import caches
from xla_debug.stacks import sync_causes
from xla_debug.stacks.sync_causes import SyncCause
from xla_debug.steps import statement_causes
from xla_debug.steps.differences import (
    Difference,
    Kind,
    compare,
    count_operations,
    name_of,
    shared_with,
)
from xla_debug.steps.recompile_text import Cause, Explanation, operator_text, place_of, words

logger = logging.getLogger(__name__)

# The number of latest programs with which a new one is compared; in a loop that always recompiles, these suffice.
COMPARED: Final = 64
# The most explanations, and the most names of evicted programs, that are kept.
KEPT: Final = 4096
# The most programs that are being compiled at once.
IN_THE_MAKING: Final = 32
# Programs that share a smaller part of their operators than this are not compared.
ALIKE: Final = 0.5
# If this number of last operators agree, a shorter step counts as the end of a longer one.
_TAIL: Final = 20
# A program with fewer operators may be contained in another one by chance.
_WHOLE_STEP: Final = 12
# The numbers of programs with the same cause and line at which a warning is logged.
TOLD_AT: Final = (3, 10, 100)

MSG_AGAIN: Final = (
    "compiled %d programs for the same reason: %s at %s. The last: %s. Advice: %s. All of them: "
    "xla_debug.recompile.report()"
)
TEXT_EARLY: Final = (
    "a value was needed here, so the {count} operation{s} recorded before it ran as a separate "
    "program"
)
TEXT_REST: Final = "the rest of a step whose beginning ran at this line, where a value was needed"
MSG_LIMIT: Final = "this block may make {limit} new program{s} and needs one more. {report}"


class RecompilationError(RuntimeError):
    """A new program is needed where no more may be compiled; ``explanation`` says why it is needed."""

    def __init__(self, text: str, explanation: Explanation) -> None:
        super().__init__(text)
        self.explanation = explanation


@dataclasses.dataclass
class Known:
    """What is kept of a program to compare others with it.

    ``last`` is the last entry of its step, ``outputs`` are the value numbers of its results, and ``histogram``
    counts its operators. ``after`` is set if the program runs the rest of a step whose beginning ran before.
    ``line`` is the user's line that made it run.
    """

    name: str
    first: Entry
    last: Entry
    outputs: tuple[int, ...]
    histogram: Counter[str]
    after: Cut | None
    line: Frame | None


class Cut(NamedTuple):
    """Where a step was cut in two: the line that made its beginning run, and the cause."""

    line: Frame | None
    cause: SyncCause


@dataclasses.dataclass(eq=False)
class _Limit:
    """A block of ``limit``: the number of new programs that it may need, and the number that it needed so far."""

    most: int
    needed: int = 0


class _History:
    """The programs that this process made last, and the explanations why they were made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.known: collections.deque[Known] = collections.deque(maxlen=COMPARED)
        self.explanations: collections.deque[Explanation] = collections.deque(maxlen=KEPT)
        self.counts: caches.Bounded[tuple[Cause, str, int], int] = caches.Bounded("told causes")
        # The programs of beginnings of steps, which ran because a value was read, with the line that read it.
        self.early: dict[str, Cut] = {}
        self.evicted: dict[str, None] = {}
        # For each device index, where the beginning of the current step was cut off.
        self.split: dict[int, Cut] = {}
        # Whether the user has ended a step: only then can a value be read in the middle of one.
        self.marked = False
        # The programs that are being made, by name and device index.
        self.pending: dict[tuple[str, int], tuple[Known, Explanation]] = {}
        self.limits: list[_Limit] = []


_history = _History()


def explanations() -> list[Explanation]:
    """The explanations why this process made its programs (the last ``KEPT`` of them), oldest first.

    Waits for programs that are still being compiled.
    """
    runtime.settle()
    return list(_history.explanations)


def summary() -> dict[Cause, int]:
    """The number of programs for each cause, the most frequent first. Waits as ``explanations`` does."""
    runtime.settle()
    counted = Counter(e.cause for e in _history.explanations)
    return dict(counted.most_common())


def report() -> str:
    """The summary by cause, and all explanations, as text; empty if no program was made."""
    runtime.settle()
    if not _history.explanations:
        return ""
    lines = [f"{count:5} {cause.value}" for cause, count in summary().items()]
    return "\n".join(["programs by cause:", *lines, "", *(e.report() for e in explanations())])


def clear() -> None:
    """Drop all explanations. New programs are still compared with the earlier ones."""
    with _history.lock:
        _history.explanations.clear()
        _history.counts.clear()


@contextlib.contextmanager
def limit(max_different_graphs: int = 0) -> Iterator[None]:
    """A context manager that raises RecompilationError if the block needs too many new programs.

    ``max_different_graphs`` (default: 0) is the number of new programs that it may need. The error is raised at the
    line that runs the step, before anything is compiled, and says why the program is new; the recorded operations
    stay pending. Raises ValueError if ``max_different_graphs`` is negative.
    """
    if max_different_graphs < 0:
        raise ValueError(f"max_different_graphs is {max_different_graphs}; give 0 or more")
    block = _Limit(max_different_graphs)
    _history.limits.append(block)
    try:
        yield
    finally:
        _history.limits.remove(block)


def no_recompile() -> contextlib.AbstractContextManager[None]:
    """A context manager that raises RecompilationError if the block needs a new program."""
    return limit(0)


# -- events of the core -------------------------------------------------------------------------


def on_missing(
    trace: Trace, name: str, entries: Sequence[Entry], outputs: tuple[int, ...]
) -> Explanation:
    """Explain why a step has no program yet. Raises RecompilationError if a block of ``limit`` allows none."""
    index = trace.device.index
    with _history.lock:
        known, explanation = _explain(name, entries, outputs, index)
        for block in _history.limits:
            if block.needed >= block.most:
                text = MSG_LIMIT.format(
                    limit=block.most, s="s" * (block.most != 1), report=explanation.report()
                )
                raise RecompilationError(text, explanation)
            block.needed += 1
        _history.pending[name, index] = (known, explanation)
        while len(_history.pending) > IN_THE_MAKING:  # programs that failed to compile stay here
            del _history.pending[next(iter(_history.pending))]
    return explanation


def on_made(trace: Trace, program: programs.StepProgram) -> None:
    """Keep the explanation of a program that was missing and is made now, and warn if its cause recurs."""
    with _history.lock:
        pending = _history.pending.pop((program.name, trace.device.index), None)
        if pending is None:
            return
        known, explanation = pending
        explanation = dataclasses.replace(
            explanation, seconds=program.compile_seconds, from_cache=program.from_cache
        )
        _history.known.append(known)
        _history.explanations.append(explanation)
        key = (explanation.cause, explanation.filename, explanation.line)
        count = _history.counts.keep(key, _history.counts.get(key, 0) + 1)
    logger.info("%s", explanation.report())
    normal = explanation.cause in (Cause.FIRST, Cause.NEW)
    if count in TOLD_AT and not normal:
        cause = explanation.cause.value
        where, advice = explanation.where(), explanation.advice
        logger.warning(MSG_AGAIN, count, cause, where, explanation.text, advice)


def on_requested(trace: Trace, program: programs.StepProgram) -> None:
    """A program is going to run. If it is the beginning of a step, the next one is the rest of that step."""
    if program.name in _history.early:
        _history.split[trace.device.index] = _history.early[program.name]


def on_evicted(program: programs.StepProgram) -> None:
    """A program was evicted to make room for others: it may have to be made again."""
    with _history.lock:
        _history.early.pop(program.name, None)
        _history.evicted[program.name] = None
        while len(_history.evicted) > KEPT:
            del _history.evicted[next(iter(_history.evicted))]


def on_forgotten(trace: Trace) -> None:
    """All steps of a device were dropped: release their entries, each of which keeps the whole tree alive."""
    with _history.lock:
        others = [known for known in _history.known if _root(known.last) is not trace.root]
        _history.known.clear()
        _history.known.extend(others)
        for key, (known, _) in list(_history.pending.items()):
            if _root(known.last) is trace.root:
                del _history.pending[key]


def _root(entry: Entry) -> Entry:
    while entry.parent is not None:
        entry = entry.parent
    return entry


def on_step_marked(index: int) -> None:
    """The user has ended a step on the device with this index."""
    _history.marked = True
    _history.split.pop(index, None)


# -- comparing with the nearest program ---------------------------------------------------------


def _explain(
    name: str, entries: Sequence[Entry], outputs: tuple[int, ...], index: int
) -> tuple[Known, Explanation]:
    cause, stack = sync_causes.current()
    line = stack[0] if stack else None
    after = _history.split.get(index)
    histogram = Counter(name_of(e) for e in entries)
    mine = Known(name, entries[0], entries[-1], outputs, histogram, after, line)
    if not cause.ends_step:
        _history.early[name] = Cut(line, cause)
    if name in _history.evicted:
        return mine, _again(mine, entries, stack)
    nearest = _nearest(mine, entries)
    if nearest is None:
        return mine, _without_peer(mine, entries, cause, stack)
    explanation = _against(mine, entries, nearest, cause, stack)
    return mine, explanation


def _alike(a: Counter[str], b: Counter[str]) -> float:
    """The part of two programs' operators that they have in common, from 0 to 1.

    A whole step that another program contains (which made the model, too) is like it.
    """
    if dict.__eq__(a, b):  # as Counter compares them, in Python, it would take as long as all below
        return 1.0
    total = max(a.total(), b.total())
    ours, theirs = (Counter({n: c for n, c in x.items() if "." in n}) for x in (a, b))  # no inputs
    fewer = min(ours.total(), theirs.total())
    contained = fewer >= _WHOLE_STEP and (ours & theirs).total() >= 0.9 * fewer
    return max((a & b).total() / total, ALIKE if contained else 0.0)


def _compared(name: str) -> list[Known]:
    """The programs with which the one called ``name`` is compared, oldest first, and those that are being made."""
    being_made = [known for known, _ in _history.pending.values() if known.name != name]
    return [*_history.known, *being_made]


def _nearest(mine: Known, entries: Sequence[Entry]) -> Known | None:
    """The known program most like this one; one whose beginning this is, or the reverse, first."""
    best: tuple[object, ...] | None = None
    chosen = None
    positions = {entry: position for position, entry in enumerate(entries)}
    for age, known in enumerate(reversed(_compared(mine.name))):
        shared = shared_with(known.last, positions) if known.first is mine.first else 0
        alike = _alike(mine.histogram, known.histogram)
        prefix = shared == len(entries) and shared > 2
        if alike < ALIKE and not prefix:
            continue
        rank = (prefix or shared == known.last.depth, alike, shared, -age)
        if best is None or rank > best:
            best, chosen = rank, known
    return chosen


def _early_text(entries: Sequence[Entry]) -> str:
    count = count_operations(entries)
    return TEXT_EARLY.format(count=count, s="s" * (count != 1))


def _without_peer(
    mine: Known, entries: Sequence[Entry], cause: SyncCause, stack: tuple[Frame, ...]
) -> Explanation:
    """The explanation of a program to which no known one is similar."""
    first = not _compared(mine.name)
    operator = next(iter(operations_of(entries) or entries))
    text = (
        "nothing was compiled before"
        if first
        else f"it begins with {operator_text(operator)}, and no earlier program is similar"
    )
    result = Cause.FIRST if first else Cause.NEW
    place = place_of(operator)
    frames = place.frames if place is not None and place.frames else stack[:1]
    if cause is SyncCause.SIZE:
        result, frames = Cause.DATA_SIZE, stack[:4]
        text = _early_text(entries)
    elif not (first or cause.ends_step) and _history.marked and stack:
        result, frames = Cause.EARLY_SYNC, stack[:4]
        text = _early_text(entries)
    elif cause.ends_step and mine.after is not None and mine.after.line is not None:
        result, frames, text = _cut_cause(mine.after), (mine.after.line,), TEXT_REST
    return Explanation(
        program=mine.name, cause=result, text=text, frames=frames,
        scope=place.scope if place is not None else "", operator=name_of(operator),
        operations=count_operations(entries), position=0, nearest=None,
    )  # fmt: skip


def _cut_cause(cut: Cut) -> Cause:
    return Cause.DATA_SIZE if cut.cause is SyncCause.SIZE else Cause.EARLY_SYNC


def _again(mine: Known, entries: Sequence[Entry], stack: tuple[Frame, ...]) -> Explanation:
    """The explanation of a program that was evicted and is made again."""
    del _history.evicted[mine.name]
    return Explanation(
        program=mine.name, cause=Cause.EVICTED, frames=stack[:1], scope="", operator="",
        text="the process had this program, and evicted it to make room for others",
        operations=count_operations(entries), position=0, nearest=mine.name,
    )  # fmt: skip


def _against(
    mine: Known,
    entries: Sequence[Entry],
    nearest: Known,
    cause: SyncCause,
    stack: tuple[Frame, ...],
) -> Explanation:
    """The explanation of a program by its first difference from the nearest known one."""
    old = nearest.last.path()
    difference = compare(old, entries)
    explained = words(difference)
    subject = explained.entry
    place = place_of(subject)
    frames = place.frames if place is not None and place.frames else stack[:1]
    result, text = explained.cause, explained.text
    early = not cause.ends_step and difference.kind in (Kind.ENDS, Kind.RESULTS)
    after = mine.after
    if early and stack:
        result, frames = _cut_cause(Cut(stack[0], cause)), stack[:4]
        text = _early_text(entries)
        text += f"; {operator_text(subject)} would have come next"
    elif (
        after is not None
        and after.line is not None
        and _is_cut(entries, after, nearest, difference, result)
    ):
        result, frames = _cut_cause(after), (after.line, *frames[:3])
        text = f"{TEXT_REST}; compared with another: {text}"
    elif difference.kind is Kind.RESULTS:
        text, frames = _results_text(mine, nearest, entries, stack)
    else:
        ran_once = _runs(nearest.name) == 1
        of_statement = statement_causes.find(old, entries, difference, explained, stack, ran_once)
        if of_statement is not None:
            result, text, frames = of_statement
    return Explanation(
        program=mine.name, cause=result, text=text, frames=frames,
        scope=place.scope if place is not None else "",
        operator=name_of(subject) if subject is not None else "",
        operations=count_operations(entries),
        position=count_operations(entries[: difference.position]), nearest=nearest.name,
    )  # fmt: skip


def _is_cut(
    entries: Sequence[Entry], after: Cut, nearest: Known, difference: Difference, cause: Cause
) -> bool:
    """Whether the program is new because a value was read in the middle of the step that it ends."""
    if after.cause is SyncCause.SIZE:
        return cause is Cause.SIZE
    if nearest.after is not None:
        return False
    # the nearest program may be the beginning that was cut off, with which the rest shares nothing
    apart = not count_operations(entries[: difference.position])
    return (apart and nearest.name in _history.early) or _is_rest(entries, nearest)


def _runs(name: str) -> int:
    """The number of runs of the program with this name."""
    return next((p.runs for p in programs.all_programs() if p.name == name), 0)


def _is_rest(entries: Sequence[Entry], whole: Known) -> bool:
    """Whether a step has the last operators of a longer one."""
    mine = list(map(name_of, operations_of(entries)))
    theirs = list(map(name_of, operations_of(whole.last.path())))
    tail = min(len(mine), _TAIL)
    return tail > 0 and len(mine) < len(theirs) and mine[-tail:] == theirs[-tail:]


def _results_text(
    mine: Known, nearest: Known, entries: Sequence[Entry], stack: tuple[Frame, ...]
) -> tuple[str, tuple[Frame, ...]]:
    """The description of programs that differ only in their results, and the user's lines."""
    added = sorted(set(mine.outputs) - set(nearest.outputs))
    gone = sorted(set(nearest.outputs) - set(mine.outputs))
    for vids, what in ((added, "is kept now and was not before"), (gone, "is not kept any more")):
        if vids:
            maker = next(e for e in entries if e.first <= vids[0] < e.end)
            place: SourceLocation | None = place_of(maker)
            more = f" (and {len(vids) - 1} more)" if len(vids) > 1 else ""
            frames = place.frames if place is not None and place.frames else stack[:1]
            return f"the result of {operator_text(maker)}{more} {what}", frames
    return "the results are the same, but they reuse the memory of other inputs", stack[:1]
