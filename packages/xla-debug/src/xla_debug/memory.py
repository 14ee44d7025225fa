"""What occupies device memory: live tensors by the line that created them, a step's peak, missed donations.

The lines are known only for tensors that were created after ``track()``: it records where each result of a program
and each upload came from. It uses weak references, which keep no value alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.extension_api import programs, runtime, tensors
from xla_core.extension_api.source_location import Frame, SourceLocation
from xla_core.extension_api.steps import (
    Entry,
    Operation,
    TensorMeta,
    Trace,
    inputs_of,
    needed_entries,
)
from xla_core.support import caches
from xla_core.support.counters import render_bytes
from xla_debug.stacks import stack_frames
from xla_debug.steps.recompile_text import operator_text, tensor_text

UNKNOWN: Final = "(created before memory.track())"


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """One value in device memory that ``tensors`` tensors hold.

    ``nbytes`` is its size in the PyTorch dtype ``dtype``. ``made_by`` is the operator that computed it and
    ``frame`` the user's line; they are empty and None if the value was created before ``track()``.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str
    made_by: str
    frame: Frame | None
    tensors: int

    def where(self) -> str:
        """The file and line that created the value (``train.py:12``), or ``UNKNOWN``."""
        return f"{self.frame.filename}:{self.frame.line}" if self.frame is not None else UNKNOWN


@dataclasses.dataclass(frozen=True)
class Held:
    """A value that is alive at the peak of a step: the operation or input it is, its size, and the user's line."""

    what: str
    nbytes: int
    where: str


@dataclasses.dataclass(frozen=True)
class StepPeak:
    """The memory that one program needs, in bytes.

    ``peak`` is computed from the compiler's figures, ``by_use``: arguments, results and temporaries, less the
    memory that is reused. The other attributes describe the step as it was recorded, before the compiler fuses
    operations, which is an upper bound: ``at`` is the operation at which most memory is in use, ``unfused`` is this
    number of bytes, and ``held`` has the largest values that are alive there.
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
            f"largest values at {self.at}, of {render_bytes(self.unfused)} before operations are fused:",
            *(f"  {render_bytes(h.nbytes):>9}  {h.what}  {h.where}" for h in self.held),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class MissedDonation:
    """An input ``what`` of ``nbytes`` bytes whose memory no result of the program reuses, and the reason."""

    program: str
    what: str
    nbytes: int
    where: str
    reason: str


REASON_HELD: Final = (
    "another tensor still used the old value in {count} of {runs} runs, so that it was copied first"
)
REASON_READ: Final = (
    "the step only reads it, and nothing uses it after the step. A result of the same shape could have its memory: "
    "compute that in place (x.mul_(2), x.copy_(result)), or keep the tensor for the next step"
)
GRAPH: Final = "a graph of torch.compile"


class _Origins:
    """The operator and line that created each buffer. The entry of a buffer is removed when the buffer dies."""

    def __init__(self) -> None:
        self.of: dict[
            int, tuple[weakref.ref[object], str, Frame | None]
        ] = {}  # by the id of the buffer
        self.undo: list[Callable[[], None]] = []

    def add(self, buffer: Buffer, made_by: str, frame: Frame | None) -> None:
        key = id(buffer)

        def gone(_: object) -> None:
            self.of.pop(key, None)

        self.of[key] = (weakref.ref(buffer, gone), made_by, frame)

    def get(self, buffer: object) -> tuple[str, Frame | None]:
        origin = self.of.get(id(buffer))
        return (
            (origin[1], origin[2]) if origin is not None and origin[0]() is buffer else ("", None)
        )


_origins = _Origins()
_last_entries: caches.Bounded[str, list[Entry]] = caches.Bounded("steps of programs")


def track() -> None:
    """From now on, record the line that creates each value. This costs time per step, not per operation."""
    if _origins.undo:
        return
    tensors.tell_lines(_line_of)
    _origins.undo = [
        events.subscribe(events.ProgramExecuted, _on_executed),
        events.subscribe(events.TransferToDevice, _on_upload),
    ]


def stop_tracking() -> None:
    """Undo ``track``, and drop the recorded lines."""
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
    if not trace.cur.depth:  # a graph of torch.compile, which was recorded earlier
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


def _makers(program: programs.StepProgram, last: Entry) -> dict[int, Entry]:
    makers = _makers_of.get(program.name)
    if makers is None:
        outputs = set(program.output_index)
        entries = _last_entries.keep(program.name, last.path())
        makers = {vid: e for e in entries for vid in range(e.first, e.end) if vid in outputs}
        _makers_of.keep(program.name, makers)
    return makers


def _on_evicted(event: events.ProgramEvicted) -> None:
    for table in (_last_entries, _makers_of, _dead_inputs):
        table.pop(event.program.name, None)  # type: ignore[attr-defined]


def _on_forgotten(_event: events.StepsForgotten) -> None:
    # release the entries: each one keeps its whole tree of steps alive
    _last_entries.clear()
    _makers_of.clear()
    _dead_inputs.clear()


# Subscribe for good, since reports can be made after tracking has ended, too.
events.subscribe(events.ProgramEvicted, _on_evicted)
events.subscribe(events.StepsForgotten, _on_forgotten)


def _on_upload(event: events.TransferToDevice) -> None:
    frames = stack_frames.user_frames(sys._getframe(1), limit=1)
    _origins.add(event.buffer, "uploaded", frames[0] if frames else None)


def _line_of(buffer: object) -> str:
    """The line that created a value, for out-of-memory errors."""
    frame = _origins.get(buffer)[1]
    return f"{frame.filename}:{frame.line} in {frame.function}" if frame is not None else ""


def live_tensors() -> list[LiveTensor]:
    """All values in device memory that a tensor holds, largest first."""
    live = []
    for storage, buffer, holders in tensors.held_values():
        if storage.buffer is None:
            continue  # the pending step replaces the value
        made_by, frame = _origins.get(buffer)
        meta = storage.meta
        dtype = str(meta.dtype).removeprefix("torch.")
        device = str(storage.trace.device)
        live.append(LiveTensor(meta.shape, dtype, meta.nbytes, device, made_by, frame, holders))
    return sorted(live, key=lambda t: (-t.nbytes, t.where(), t.shape))


def report(limit: int = 20) -> str:
    """The live tensors as text, grouped by line, shape and dtype: the ``limit`` (default: 20) largest groups."""
    groups: defaultdict[tuple[str, str, str, str, tuple[int, ...]], list[LiveTensor]] = defaultdict(
        list
    )
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
    """The peak of ``program`` (default: the one with the highest), with the ``largest`` (default: 10) values at it.

    Only programs that ran since ``track()`` are known. Raises RuntimeError if there is none.
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
    """The operations of a step in order, each with the bytes that are alive once it has its result.

    Inputs are alive during the whole step, results from their operation to their last use. The figures are those
    before the compiler fuses operations: an upper bound, which shows where a step needs its memory. ``program`` and
    errors are those of ``step_peak``.
    """
    program, entries = _step_of(program)
    # _alive_over() counts an input from its entry on, but its memory is in use from the beginning
    later_inputs = sum(m.nbytes for e in inputs_of(entries) for m in e.metas if m is not None)
    timeline: list[tuple[str, int]] = []
    for entry, total, _alive in _alive_over(entries, set(program.output_index)):
        if isinstance(entry, Operation):
            timeline.append((operator_text(entry), total + later_inputs))
        else:
            later_inputs -= sum(m.nbytes for m in entry.metas if m is not None)
    return timeline


def _step_of(
    program: programs.StepProgram | None,
) -> tuple[programs.StepProgram, Sequence[Entry]]:
    """A program, by default the one that needs most memory, and the entries of its step."""
    if program is None:
        tracked = [p for p in programs.all_programs() if p.name in _last_entries]
        if not tracked:
            raise RuntimeError("no program has run since memory.track(); call it before the step")
        program = max(tracked, key=_compiled_peak)
    return program, needed_entries(_last_entries[program.name], tuple(program.output_index))


def _alive_over(
    entries: Sequence[Entry], outputs: set[int]
) -> Iterator[tuple[Entry, int, dict[int, tuple[Entry, TensorMeta]]]]:
    """For each entry, the bytes that are alive after it, and the live values by number.

    It yields the same dict each time, and changes it in between.
    """
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
        # inputs stay alive until the end of the step, because the caller holds them
        dead = [
            v
            for v, (e, _) in alive.items()
            if isinstance(e, Operation) and last_use.get(v, -1) <= position
        ]
        for vid in dead:
            total -= alive.pop(vid)[1].nbytes


def _peak_of(
    entries: Sequence[Entry], outputs: set[int]
) -> tuple[int, Entry, list[tuple[Entry, TensorMeta]]]:
    """The most bytes that are alive at once, the entry after which they are, and the values that are alive then."""
    most, most_at, alive_then = -1, entries[0], list[tuple[Entry, TensorMeta]]()
    for entry, total, alive in _alive_over(entries, outputs):
        if total > most:
            most, most_at, alive_then = total, entry, list(alive.values())
    return most, most_at, alive_then


def missed_donations(least: int = 1024) -> list[MissedDonation]:
    """Inputs of at least ``least`` (default: 1024) bytes whose memory could have been reused, largest first.

    There are two kinds: inputs that the step overwrites but that another tensor still used, so that they were
    copied; and inputs that nothing uses after the step, while a result of the same shape gets new memory. Only
    programs that ran since ``track()`` are examined.
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
    aliased = {position for _, position in program.aliases}
    with_new_memory = [
        makers[vid].metas[vid - makers[vid].first]
        for vid, position in program.output_index.items()
        if position not in aliased and vid in makers
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
        elif meta in with_new_memory and _is_dead(program, slot):
            with_new_memory.remove(meta)
            yield MissedDonation(program.name, held.what, meta.nbytes, held.where, REASON_READ)


def _is_dead(program: programs.StepProgram, slot: int) -> bool:
    return slot in _dead_inputs.get(program.name, ())


_dead_inputs: caches.Bounded[str, frozenset[int]] = caches.Bounded("inputs that die")

# The reference counts of a storage that only the trace holds (its list, and getrefcount's argument), and of the
# buffer of such a storage (the storage, the trace's list of inputs, the run's list of arguments, the argument).
_TRACE_ONLY: Final = 2
_RUN_ONLY: Final = 4


def _dead(trace: Trace) -> frozenset[int]:
    """The inputs of the running step that nothing will use after it."""
    dead = set()
    touched, inputs = trace.touched, trace.inputs
    for slot, position in enumerate(trace.input_storages):
        storage_count = sys.getrefcount(touched[position])
        if storage_count <= _TRACE_ONLY and sys.getrefcount(inputs[slot]) <= _RUN_ONLY:
            dead.add(slot)
    return frozenset(dead)


def device_report() -> str:
    """The bytes in use, the peak and the limit of every device, as text."""
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
