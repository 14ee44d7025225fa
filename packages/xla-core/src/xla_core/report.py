"""What ran: programs, fallbacks, and how fast an executable is on its own."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from xla_core import counters, programs


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRuns:
    """One compiled program: recorded operators, runs so far, seconds to make it (0 runs: not yet)."""

    name: str
    operations: int
    runs: int
    compile_seconds: float
    from_cache: bool


def program_runs() -> list[ProgramRuns]:
    """Every program of this process, oldest first."""
    return [
        ProgramRuns(p.name, p.operations, p.runs, p.compile_seconds, p.from_cache)
        for p in programs.all_programs()
    ]


def fallback_counts() -> dict[str, int]:
    """How often each operator ran on the CPU, by its counter's name (``aten::op``)."""
    return {
        name: count for name, count in counters.all_counters().items() if name.startswith("aten::")
    }


def replay_seconds(repeats: int, program: programs.StepProgram | None = None) -> float:
    """Mean seconds of one run of an executable alone, on buffers of its own of the same shapes.

    Default: the program that ran most often. Donated buffers are replaced by the results that took
    over their memory, as in training. Raises RuntimeError when nothing ran yet.
    """
    known = programs.all_programs()
    if program is None:
        if not known:
            raise RuntimeError("no program has run yet; train at least one step first")
        program = max(known, key=lambda p: p.runs)
    backend = program.backend
    arguments = [
        backend.client.put(np.ones(spec.shape, spec.dtype), backend.placement)
        for spec in program.inputs
    ]
    results = program.executable.execute(list(arguments))
    backend.client.wait(results)
    started = time.perf_counter()
    for _ in range(repeats):
        for slot, position in program.aliases:
            arguments[slot] = results[position]
        results = program.executable.execute(list(arguments))
        backend.client.wait(results)
    return (time.perf_counter() - started) / repeats
