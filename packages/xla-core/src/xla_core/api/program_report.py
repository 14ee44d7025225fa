"""Reports on compiled programs: their runs, memory and costs, CPU fallbacks, and the time of one run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from xla_core.compilation import program_table
from xla_core.support import counters
from xla_core.varying.padded_buffer import whole_buffer


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRuns:
    """One compiled program: its ``name``, the number of recorded ``operations``, and of ``runs`` so far.

    ``compile_seconds`` is the time to compile it, or to load it if it came ``from_cache``, the persistent cache.
    """

    name: str
    operations: int
    runs: int
    compile_seconds: float
    from_cache: bool


def program_runs() -> list[ProgramRuns]:
    """Every program of this process, oldest first."""
    return [
        ProgramRuns(p.name, p.operations, p.runs, p.compile_seconds, p.from_cache)
        for p in program_table.all_programs()
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramFigures:
    """The compiler's figures for one program on one device: bytes by use, and the costs of one run.

    ``name`` is the step's, ``runs`` the number of runs so far. ``arguments``, ``outputs``, ``temporaries`` and
    ``code`` are bytes; ``aliased`` are the bytes of outputs that reuse an argument's memory. ``total`` is what the
    program needs while it runs, ``limit`` the device's memory (None: not known). ``flops``, ``bytes_accessed``,
    ``seconds`` and a TPU's ``cycles`` are the compiler's estimates, None if it makes none; each counts the body of
    a loop once.
    """

    name: str
    runs: int
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    limit: int | None
    flops: float | None
    bytes_accessed: float | None
    seconds: float | None
    cycles: float | None

    @property
    def total(self) -> int:
        """Bytes of arguments, outputs that do not reuse an argument's memory, temporaries and code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def __str__(self) -> str:
        render = counters.render_bytes
        of = f" of {render(self.limit)} ({self.total / self.limit:.1%})" if self.limit else ""
        flops = "?" if self.flops is None else f"{self.flops:.3g}"
        accessed = "?" if self.bytes_accessed is None else render(self.bytes_accessed)
        seconds = "?" if self.seconds is None else counters.render_time(self.seconds * 1e9)
        if self.cycles is not None:
            seconds = f"{self.cycles:.3g} cycles"
        return (
            f"{self.name}: {render(self.total)}{of} = arguments {render(self.arguments)} + outputs "
            f"{render(self.outputs)} - aliased {render(self.aliased)} + temporaries "
            f"{render(self.temporaries)} + code {render(self.code)}; {flops} FLOPs, {accessed} "
            f"accessed, estimated {seconds}"
        )


def program_figures() -> list[ProgramFigures]:
    """Memory and cost figures of every program of this process, oldest first."""
    return [_figures(program) for program in program_table.all_programs()]


def _figures(program: program_table.StepProgram) -> ProgramFigures:
    memory = program.executable.memory_analysis()
    cost = program.executable.cost_analysis()
    backend = program.backend
    return ProgramFigures(
        name=program.name,
        runs=program.runs,
        **{use: memory[use] for use in ("arguments", "outputs", "temporaries", "aliased", "code")},
        limit=backend.client.memory_info(backend.index).bytes_limit,
        flops=_known(cost, "flops"),
        bytes_accessed=_known(cost, "bytes accessed"),
        seconds=_known(cost, "optimal_seconds"),
        cycles=_known(cost, "estimated cycles"),
    )


def _known(cost: Mapping[str, float], name: str) -> float | None:
    """An estimate, None if there is none; XLA writes a negative number for an unknown one."""
    value = cost.get(name)
    return value if value is not None and value >= 0 else None


def fallback_counts() -> dict[str, int]:
    """How often each operator fell back to the CPU, by the name of its counter (``aten::op``)."""
    return {
        name: count
        for name, count in counters.all_counters().items()
        if name.startswith("aten::") and name != counters.SCALAR_READ
    }


def replay_seconds(repeats: int, program: program_table.StepProgram | None = None) -> float:
    """The mean time in seconds of ``repeats`` runs of a program's executable, on buffers of its own.

    ``program`` defaults to the one that ran most often. A donated buffer is replaced by the result that reused its
    memory, as in training. Raises RuntimeError if no program has run yet.
    """
    known = program_table.all_programs()
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
    backend.client.wait(list(map(whole_buffer, results)))
    started = time.perf_counter()
    for _ in range(repeats):
        for slot, position in program.aliases:
            arguments[slot] = results[position]
        results = program.executable.execute(list(arguments))
        backend.client.wait(list(map(whole_buffer, results)))
    return (time.perf_counter() - started) / repeats
