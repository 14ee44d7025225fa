"""``PT_XLA_DEBUG``: reports what compiles and runs, and why, while a script runs, in torch_xla's format."""

from __future__ import annotations

import atexit
import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from xla_core.contract import events
from xla_core.extension_api import programs, runtime
from xla_core.extension_api.source_location import Frame
from xla_core.extension_api.steps import Trace, inputs_of, wanted
from xla_core.support import caches, counters
from xla_debug import recompile, settings
from xla_debug.stacks import stack_frames, sync_causes
from xla_debug.steps import graphs

DOUBLE: Final = "=" * 80
SINGLE: Final = "-" * 80
COMPILATION: Final = "Compilation Analysis: "
POST: Final = "Post Compilation Analysis: "
EXECUTION: Final = "Execution Analysis: "
UNEXPECTED: Final = "Unexpected Execution Analysis: "
WHY: Final = "Why Compiled: "
PROFILER: Final = "pt-xla-profiler"
UNLOWERED: Final = 'Unlowered Op: "{}"'
_GIGABYTE: Final = 1 << 30
# torch_xla's bounds: more often than in every second step, after a number of steps; slower, in nanoseconds.
_TOO_OFTEN: Final = 0.5
_STEPS_FOR_COMPILES: Final = 10
_TOO_SLOW: Final = {"CompileTime": 300e9, "ExecuteTime": 30e9}

_digests: caches.Bounded[str, str] = caches.Bounded("digests of programs")
_fallbacks: caches.Bounded[tuple[str, tuple[Frame, ...]], int] = caches.Bounded(
    "places of fallbacks"
)
_reported_slow: dict[str, float] = {}  # the longest time that was reported, by metric


def digest_of(program: str) -> str:
    """The graph hash of the program with this name: 32 hexadecimal digits."""
    return _digests.get(program, program.rpartition("_")[2])


def entry_frames(start: FrameType | None = None) -> list[Frame]:
    """The stack that led to a flush, innermost first: the called function of this project, then all its callers."""
    own: Frame | None = None
    rest: list[Frame] = []
    for frame in stack_frames.frames(start or sys._getframe(1)):
        described = stack_frames.described(frame)
        if not rest and stack_frames.is_own_file(described.filename):
            own = described
        elif not described.filename.startswith("<frozen"):
            rest.append(described)
    return ([own] if own is not None else []) + rest


def write(lines: Sequence[str], prefix: str) -> None:
    """Write one report, each line of which begins with ``prefix``, to ``PT_XLA_DEBUG_FILE``, or else to stderr."""
    text = "\n" + "".join(f"{prefix}{line}\n" for line in (DOUBLE, *lines, SINGLE, DOUBLE))
    _emit(text)


def _emit(text: str) -> None:
    path = settings.DEBUG_FILE.get()
    if path:
        with Path(path).open("a") as file:
            file.write(text)
    else:
        sys.stderr.write(text)


def _reports() -> bool:
    """Whether this process writes reports: of a host's processes, only the first one does."""
    return not runtime.started() or runtime.is_master_ordinal(local=True)


def _graph_lines(title: str, trace: Trace, digest: str, inputs: int, outputs: int) -> list[str]:
    cause, _ = sync_causes.current()
    frames = entry_frames()
    limit = settings.MAX_FRAME.get()
    shown = [f"  {f.function} ({f.filename}:{f.line})" for f in frames[:limit]]
    name = [f"  Graph Name: {trace.graph_name}"] if trace.graph_name else []
    return [
        title,
        f"  {cause.value}",
        "Graph Info: ",
        *name,
        f"  Graph Hash: {digest}",
        f"  Number of Graph Inputs: {inputs}",
        f"  Number of Graph Outputs: {outputs}",
        "Python Frame Triggered Execution: ",
        *shown,
        *(["  .........."] if len(frames) > limit else []),
    ]


def on_evicted(program: programs.StepProgram) -> None:
    """A program was evicted: drop its digest."""
    _digests.pop(program.name, None)


def on_missing(event: events.ProgramMissing) -> None:
    """A program is going to be compiled: report why."""
    entries = event.entries
    _digests.keep(event.name, event.digest)
    if settings.level() < 1 or event.trace.eager_flush or not _reports():
        return
    last = entries[-1]
    inputs = len(inputs_of(entries)) + bool(last.floats) + bool(last.ints)
    lines = _graph_lines("Compilation Cause", event.trace, event.digest, inputs, len(event.outputs))
    write(lines, COMPILATION)


def on_compiled(event: events.ProgramCompiled) -> None:
    """A program was compiled: report its sizes, and how it differs from earlier programs."""
    if settings.level() < 1 or event.trace.eager_flush or not _reports():
        return
    program = event.program
    sizes = program.executable.memory_analysis()
    lowered = program.program  # None for a program that runs in stages
    source = program.name.encode() if lowered is None else lowered.stablehlo
    code = hashlib.sha256(source).hexdigest()[:32]
    _emit(f"\nComputation hash: {code}\n")
    rows = (
        ("Graph input size", "arguments"),
        ("Graph output size", "outputs"),
        ("Aliased Input size", "aliased"),
        ("Intermediate tensor size", "temporaries"),
        ("Compiled program size", "code"),
    )
    write([f"{label}: {sizes.get(key, 0) / _GIGABYTE:.6f} GB" for label, key in rows], POST)
    explained = recompile.explanations()
    if explained and explained[-1].program == program.name:
        _emit("\n" + "".join(f"{WHY}{line}\n" for line in explained[-1].report().split("\n")))


def on_executed(event: events.ProgramExecuted) -> None:
    """A program runs: report why."""
    if settings.level() < 2 or event.trace.eager_flush or not _reports():
        return
    program = event.program
    lines = _graph_lines(
        "Execution Cause",
        event.trace,
        digest_of(program.name),
        len(program.inputs),
        len(program.output_index),
    )
    write(lines, EXECUTION)


def on_refused(event: events.ExecutionRefused) -> None:
    """Operations would run inside a function that was compiled with ``full_graph=True``: always report it."""
    trace = event.trace
    if not getattr(trace.region, "full_graph", False) or not _reports():
        return
    entries, outputs = trace.cur.path(), tuple(wanted(trace)[2])
    text = graphs.graph_as_text(entries, outputs, lines=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    inputs = len(inputs_of(entries))
    write(_graph_lines("Execution Cause", trace, digest, inputs, len(outputs)), UNEXPECTED)


def on_fallback(event: events.Fallback) -> None:
    """An operator runs on the CPU: record its callers for the report at exit."""
    frames = stack_frames.user_frames(sys._getframe(1), limit=settings.MAX_FRAME.get())
    key = event.operator, frames
    _fallbacks.keep(key, _fallbacks.get(key, 0) + 1)


def on_step(_event: events.StepMarked) -> None:
    """A step ended: report habits of the script that slow its loop down."""
    if settings.level() >= 100 and _reports():
        for line in habits():
            sys.stdout.write(f"{PROFILER}: {line}\n")


def habits() -> list[str]:
    """The warnings that torch_xla's analysis of the metrics would give now."""
    counted = counters.all_counters()
    metrics = counters.all_metrics()
    steps = counted.get("MarkStep", 0)
    lines = []
    for name, least in (("CompileTime", _STEPS_FOR_COMPILES), ("TransferFromDeviceTime", 0)):
        count = metrics[name].total if name in metrics else 0
        if steps > least and count / steps > _TOO_OFTEN:
            lines.append(f"{name} too frequent: {count} counts during {steps} steps")
    for name, bound in _TOO_SLOW.items():
        longest = (
            max((v for _, v in tuple(metrics[name].samples)), default=0.0) if name in metrics else 0
        )
        if longest > max(bound, _reported_slow.get(name, 0.0)):
            _reported_slow[name] = longest
            took = counters.render_time(longest)
            lines.append(f"{name} too slow: longest instance took {took}. {_SLOW_ADVICE[name]}")
    not_lowered = list(programs.fallback_counts())
    if not_lowered:
        lines.append(
            f"Op(s) not lowered: {', '.join(not_lowered)},  Please open a GitHub issue with the above op "
            "lowering requests."
        )
    return lines


_SLOW_ADVICE: Final = {
    "CompileTime": "Please open a GitHub issue with the graph dump for the above compilation.",
    "ExecuteTime": "Please open a GitHub issue with the graph dump for the above execution.",
}


def fallback_summary() -> list[str]:
    """The lines of the report at exit: the operators that ran on the CPU, with the frames that called them."""
    stacks: Counter[str] = Counter()
    for (operator, frames), count in _fallbacks.items():
        lines = [UNLOWERED.format(operator), ""]
        lines += [f"  {frame.function} ({frame.filename}:{frame.line})" for frame in frames]
        stacks["\n".join(lines)] += count
    return usage_summary(stacks) if stacks else []


def usage_summary(stacks: Counter[str]) -> list[str]:
    """The lines of a report of the stacks that called operators on the CPU, the most frequent first."""
    lines = [
        DOUBLE,
        "Unlowered Op usage summary (more of these ops, lower performance)",
        "Note: _local_scalar_dense typically indicates CPU context access",
        SINGLE,
    ]
    for stack, count in stacks.most_common():
        lines += [f"FRAME (count={count}):", *stack.split("\n"), ""]
    return [*lines, DOUBLE]


def at_exit() -> None:
    """Log the report of operators that ran on the CPU, by the logger ``pt-xla-profiler``."""
    warn(fallback_summary())


def warn(lines: Sequence[str]) -> None:
    """Log lines by the logger ``pt-xla-profiler``; they go to stderr if logging is not set up."""
    log = logging.getLogger(PROFILER)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        log.addHandler(handler)
    for line in lines:
        log.warning(line)


def report_at_exit() -> None:
    """Call ``at_exit`` when the process ends."""
    atexit.register(at_exit)
