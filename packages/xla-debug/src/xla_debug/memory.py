"""What holds device memory: live tensors by the line that made them, a step's peak, missed donations.

Lines of live tensors are known from ``track()`` on: it remembers, for each result of a program and each
upload, where it came from, by weak references that keep nothing alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.extension_api import programs, runtime, tensors
from xla_core.extension_api.source_location import Frame, SourceLocation
from xla_core.extension_api.steps import Entry, Operation, TensorMeta, inputs_of, needed_entries
from xla_core.support import caches
from xla_core.support.counters import render_bytes
from xla_debug.stacks import stack_frames
from xla_debug.steps.recompile_text import operator_text, tensor_text

UNKNOWN: Final = "(made before memory.track())"


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """One value in device memory, held by at least one tensor; ``nbytes`` in the PyTorch dtype."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str
    made_by: str
    frame: Frame | None
    tensors: int

    def where(self) -> str:
        """``train.py:12``, or that it is not known."""
        return f"{self.frame.filename}:{self.frame.line}" if self.frame is not None else UNKNOWN


@dataclasses.dataclass(frozen=True)
class Held:
    """A value that is alive at the peak of a step, and what made it: an operation or an input."""

    what: str
    nbytes: int
    where: str


@dataclasses.dataclass(frozen=True)
class StepPeak:
    """The memory that one program needs, in bytes.

    ``peak`` is the compiler's own sum: arguments, results and temporaries less what is reused. ``held``
    are the largest values alive at the operation ``at`` where most is, before the compiler fuses
    operations: an upper bound of where memory goes, ``unfused`` bytes in all.
    """

    program: str
    peak: int
    by_use: dict[str, int]
    unfused: int
    at: str
    held: tuple[Held, ...]

    def __str__(self) -> str:
        uses = ", ".join(f"{use} {render_bytes(size)}" for use, size in self.by_use.items() if size)
        lines = [
            f"{self.program}: {render_bytes(self.peak)} at the peak ({uses})",
            f"held most at {self.at}, of {render_bytes(self.unfused)} before operations are fused:",
            *(f"  {render_bytes(h.nbytes):>9}  {h.what}  {h.where}" for h in self.held),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class MissedDonation:
    """An input of a program whose memory no result took over, and why."""

    program: str
    what: str
    nbytes: int
    where: str
    reason: str


REASON_HELD: Final = (
    "something else still held the old value in {count} of {runs} runs, so it was copied first"
)
REASON_READ: Final = (
    "it is only read, and nothing wanted it after the step: a result of its shape could have had its "
    "memory; compute that in place (x.mul_(2), x.copy_(result)), or let the tensor live"
)
GRAPH: Final = "a graph of torch.compile"


class _Origins:
    """From buffers to what made them; entries go with their buffers."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[weakref.ref[object], str, Frame | None]] = {}
        self.undo: list[Any] = []

    def add(self, buffer: Buffer, made_by: str, frame: Frame | None) -> None:
        key = id(buffer)

        def gone(_: object) -> None:
            self.of.pop(key, None)

        self.of[key] = (weakref.ref(buffer, gone), made_by, frame)

    def get(self, buffer: Buffer) -> tuple[str, Frame | None]:
        origin = self.of.get(id(buffer))
        return (
            (origin[1], origin[2]) if origin is not None and origin[0]() is buffer else ("", None)
        )


_origins = _Origins()
_last_entries: caches.Bounded[str, list[Entry]] = caches.Bounded("steps of programs")


def track() -> None:
    """From now on, remember the line that makes each value. Costs time per step, not per operation."""
    if _origins.undo:
        return
    tensors.tell_lines(_line_of)
    _origins.undo = [
        events.subscribe(events.ProgramExecuted, _on_executed),
        events.subscribe(events.TransferToDevice, _on_upload),
    ]


def stop_tracking() -> None:
    """Undo ``track``."""
    tensors.tell_lines(None)
    for undo in _origins.undo:
        undo()
    _origins.undo.clear()
    _origins.of.clear()


@contextlib.contextmanager
def tracking() -> Iterator[None]:
    """``track`` inside a ``with`` block."""
    track()
    try:
        yield
    finally:
        stop_tracking()


def _on_executed(event: events.ProgramExecuted) -> None:
    program, results, trace = event.program, event.results, event.trace
    if not trace.cur.depth:  # a compiled graph, which was recorded long ago
        frames = stack_frames.user_frames(sys._getframe(1), limit=1)
        for result in results:
            _origins.add(result, GRAPH, frames[0] if frames else None)
        return
    makers = _makers(program, trace.cur)
    _dead_inputs.keep(program.name, _dead(trace))
    for vid, position in program.output_index.items():
        entry = makers.get(vid)
        where: SourceLocation | None = entry.where if entry is not None else None
        frame = where.frames[0] if where is not None and where.frames else None
        _origins.add(results[position], operator_text(entry), frame)


_makers_of: caches.Bounded[str, dict[int, Entry]] = caches.Bounded("makers of values")


def _makers(program: Any, last: Entry) -> dict[int, Entry]:
    makers = _makers_of.get(program.name)
    if makers is None:
        wanted = set(program.output_index)
        entries = _last_entries.keep(program.name, last.path())
        makers = {vid: e for e in entries for vid in range(e.first, e.end) if vid in wanted}
        _makers_of.keep(program.name, makers)
    return makers


def _on_evicted(event: events.ProgramEvicted) -> None:
    for table in (_last_entries, _makers_of, _dead_inputs):
        table.pop(event.program.name, None)  # type: ignore[attr-defined]


def _on_forgotten(_event: events.StepsForgotten) -> None:
    # an entry keeps the whole tree of steps that it is part of
    _last_entries.clear()
    _makers_of.clear()
    _dead_inputs.clear()


# from the start to the end: what was tracked is told after the end of tracking, too
events.subscribe(events.ProgramEvicted, _on_evicted)
events.subscribe(events.StepsForgotten, _on_forgotten)


def _on_upload(event: events.TransferToDevice) -> None:
    frames = stack_frames.user_frames(sys._getframe(1), limit=1)
    _origins.add(event.buffer, "uploaded", frames[0] if frames else None)


def _line_of(buffer: Any) -> str:
    """The line that made a value, for out-of-memory errors."""
    frame = _origins.get(buffer)[1]
    return f"{frame.filename}:{frame.line} in {frame.function}" if frame is not None else ""


def live_tensors() -> list[LiveTensor]:
    """Every value in device memory that a tensor holds, the largest first."""
    live = []
    for storage, buffer, holders in tensors.held_values():
        if storage.buffer is None:
            continue  # the pending step computes another
        made_by, frame = _origins.get(buffer)
        meta = storage.meta
        dtype = str(meta.dtype).removeprefix("torch.")
        device = str(storage.trace.device)
        live.append(LiveTensor(meta.shape, dtype, meta.nbytes, device, made_by, frame, holders))
    return sorted(live, key=lambda t: (-t.nbytes, t.where(), t.shape))


def report(limit: int = 20) -> str:
    """Live tensors grouped by line, shape and dtype, as text; the ``limit`` largest groups."""
    groups: defaultdict[tuple[Any, ...], list[LiveTensor]] = defaultdict(list)
    live = live_tensors()
    for t in live:
        groups[t.where(), t.made_by, t.device, t.dtype, t.shape].append(t)
    total = sum(t.nbytes for t in live)
    lines = [f"{len(live)} live values, {render_bytes(total)}"]
    ordered = sorted(groups.items(), key=lambda g: -sum(t.nbytes for t in g[1]))
    for (where, made_by, device, dtype, shape), members in ordered[:limit]:
        size = render_bytes(sum(t.nbytes for t in members))
        lines.append(
            f"{size:>10}  {len(members)} x {dtype}{list(shape)} on {device}  {where}  {made_by}"
        )
    if len(ordered) > limit:
        lines.append(f"and {len(ordered) - limit} more groups")
    return "\n".join(lines)


# -- of one step ---------------------------------------------------------------------------------


def step_peak(program: programs.StepProgram | None = None, largest: int = 10) -> StepPeak:
    """The peak of one program (default: the one with the highest) and what is alive at it.

    Needs ``track()`` before the program runs. Raises RuntimeError when none was seen.
    """
    program, entries = _step_of(program)
    unfused, at, alive = _peak_of(entries, set(program.output_index))
    held = sorted((_held(e, meta) for e, meta in alive), key=lambda h: -h.nbytes)
    return StepPeak(
        program=program.name,
        peak=_compiled_peak(program),
        by_use=dict(program.executable.memory_analysis()),
        unfused=unfused,
        at=operator_text(at),
        held=tuple(held[:largest]),
    )


def _compiled_peak(program: programs.StepProgram) -> int:
    sizes = program.executable.memory_analysis()
    used = sum(sizes.get(key, 0) for key in ("arguments", "outputs", "temporaries"))
    return int(used - sizes.get("aliased", 0))


def _held(entry: Entry, meta: TensorMeta) -> Held:
    where: SourceLocation | None = entry.where
    frame = where.frames[0] if where is not None and where.frames else None
    what = operator_text(entry) if isinstance(entry, Operation) else "input"
    return Held(
        f"{what} {tensor_text(meta)}",
        meta.nbytes,
        f"{frame.filename}:{frame.line}" if frame else UNKNOWN,
    )


def step_timeline(program: programs.StepProgram | None = None) -> list[tuple[str, int]]:
    """What each operation of a step is, and how many bytes are alive when it has its result.

    Inputs count from the beginning to the end, results from their operation to their last use. This is before
    the compiler fuses operations: an upper bound, whose form tells where a step needs its memory. Takes
    ``program``, and raises, as ``step_peak`` does.
    """
    program, entries = _step_of(program)
    missing = sum(m.nbytes for e in inputs_of(entries) for m in e.metas if m is not None)
    timeline: list[tuple[str, int]] = []
    for entry, total, _alive in _alive_over(entries, set(program.output_index)):
        if isinstance(entry, Operation):
            timeline.append((operator_text(entry), total + missing))
        else:
            missing -= sum(m.nbytes for m in entry.metas if m is not None)
    return timeline


def _step_of(
    program: programs.StepProgram | None,
) -> tuple[programs.StepProgram, Sequence[Entry]]:
    """A program, by default the one that needs most, and what it computes."""
    if program is None:
        seen = [p for p in programs.all_programs() if p.name in _last_entries]
        if not seen:
            raise RuntimeError("no program has run since memory.track(); call it before the step")
        program = max(seen, key=_compiled_peak)
    return program, needed_entries(_last_entries[program.name], tuple(program.output_index))


def _alive_over(
    entries: Sequence[Entry], outputs: set[int]
) -> Iterator[tuple[Entry, int, dict[int, tuple[Entry, TensorMeta]]]]:
    """After each entry: the bytes that are alive, and the values with what they are (one dict, which changes)."""
    last_use: dict[int, int] = {}
    for position, entry in enumerate(entries):
        for ref in entry.references():
            last_use[ref.vid] = position
    for vid in outputs:
        last_use[vid] = len(entries)
    alive: dict[int, tuple[Entry, TensorMeta]] = {}
    total = 0
    for position, entry in enumerate(entries):
        for offset, meta in enumerate(entry.metas):
            if meta is not None:
                alive[entry.first + offset] = (entry, meta)
                total += meta.nbytes
        yield entry, total, alive
        # the caller holds inputs to the end of the step
        over = [
            v
            for v, (e, _) in alive.items()
            if isinstance(e, Operation) and last_use.get(v, -1) <= position
        ]
        for vid in over:
            total -= alive.pop(vid)[1].nbytes


def _peak_of(
    entries: Sequence[Entry], outputs: set[int]
) -> tuple[int, Entry, list[tuple[Entry, TensorMeta]]]:
    """Bytes alive at the operation where most are, that operation, and the values with what they are."""
    best, best_at, best_alive = -1, entries[0], list[tuple[Entry, TensorMeta]]()
    for entry, total, alive in _alive_over(entries, outputs):
        if total > best:
            best, best_at, best_alive = total, entry, list(alive.values())
    return best, best_at, best_alive


def missed_donations(least: int = 1024) -> list[MissedDonation]:
    """Inputs of at least ``least`` bytes whose memory could have been reused and was not, largest first.

    Two kinds: inputs that are overwritten in the step but were still held elsewhere, so that they
    were copied; and inputs that die in the step while a result of their shape gets memory of its
    own. Programs that ran since ``track()`` are looked at.
    """
    missed: list[MissedDonation] = []
    for program in programs.all_programs():
        entries = _last_entries.get(program.name)
        if entries:
            missed += _missed(program, entries, least)
    return sorted(missed, key=lambda m: -m.nbytes)


def _missed(
    program: programs.StepProgram, entries: Sequence[Entry], least: int
) -> Iterator[MissedDonation]:
    inputs = inputs_of(entries)
    makers = _makers_of.get(program.name, {})
    taken = {position for _, position in program.aliases}
    free = [
        makers[vid].metas[vid - makers[vid].first]
        for vid, position in program.output_index.items()
        if position not in taken and vid in makers
    ]
    for slot, entry in enumerate(inputs):
        meta = entry.metas[0]
        if meta is None or meta.nbytes < least:
            continue
        held = _held(entry, meta)
        if slot in program.donated:
            if program.copied_donations:
                reason = REASON_HELD.format(count=program.copied_donations, runs=program.runs)
                yield MissedDonation(program.name, held.what, meta.nbytes, held.where, reason)
        elif meta in free and _is_dead(program, slot):
            free.remove(meta)
            yield MissedDonation(program.name, held.what, meta.nbytes, held.where, REASON_READ)


def _is_dead(program: programs.StepProgram, slot: int) -> bool:
    return slot in _dead_inputs.get(program.name, ())


_dead_inputs: caches.Bounded[str, frozenset[int]] = caches.Bounded("inputs that die")

# References to a storage that the trace alone keeps: its list, getrefcount's argument. To such a
# storage's buffer: the storage, the trace's list of inputs, the run's list of arguments, the argument.
_TRACE_ONLY: Final = 2
_RUN_ONLY: Final = 4


def _dead(trace: Any) -> frozenset[int]:
    """The inputs of the step that is being run that nothing will want after it."""
    dead = set()
    touched, inputs = trace.touched, trace.inputs
    for slot, position in enumerate(trace.input_storages):
        storage_count = sys.getrefcount(touched[position])
        if storage_count <= _TRACE_ONLY and sys.getrefcount(inputs[slot]) <= _RUN_ONLY:
            dead.add(slot)
    return frozenset(dead)


def device_report() -> str:
    """Bytes in use, limit and peak of every device, as text."""
    lines = []
    for device in runtime.devices():
        info = runtime.memory_info(device)
        limit = info["bytes_limit"]
        lines.append(
            f"{device}: {render_bytes(info['bytes_used'] or 0)} in use, "
            f"{render_bytes(info['peak_bytes_used'] or 0)} at most"
            + (f", of {render_bytes(limit)}" if limit else "")
        )
    return "\n".join(lines)
