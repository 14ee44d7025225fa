"""Makes the program of a step: from the persistent cache if it is there, else lowered and compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from xla_core.compilation import program_identity, progress_line, stored_programs
from xla_core.compilation.program_table import StepProgram, make_room
from xla_core.compilation.staged_executable import StagedExecutable
from xla_core.contract import events
from xla_core.contract.device_protocol import DeviceClient, Executable, Program
from xla_core.jax_bridge import jax_private
from xla_core.lowering import compile_settings, program_failures
from xla_core.lowering.call_alias_check import clashes, kept_functions
from xla_core.lowering.step_program import StepLowering, input_specs, outlining_of
from xla_core.lowering.step_verifier import verify
from xla_core.operators.extensions import extensions
from xla_core.recording.storage import Backend
from xla_core.recording.trace import Entry, Trace
from xla_core.support import counters

CLASH_COUNTER: Final = "RepeatInlined"
"""Counts functions that were inlined after all, since XLA may have compiled their calls wrongly."""


def build(
    trace: Trace,
    outputs: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    metric: str = "CompileTime",
) -> StepProgram:
    """The program that computes ``outputs`` of the pending step; ``metric`` gets the time to compile it."""
    started = time.perf_counter()
    compiling = 0.0
    entries = trace.cur.path()
    index = {vid: i for i, vid in enumerate(outputs)}
    aliases = tuple((slot, index[vid]) for slot, vid in pairs)
    verify(entries, outputs, aliases)
    backend = trace.backend
    with program_failures.costing():
        layout = backend.layout(trace, entries, outputs, aliases)
    aliases = layout.aliases
    text = key_text(entries, outputs, aliases) + f"\n{outlining_of(backend.client)}".encode()
    text += compile_settings.key_text(backend.formats) + layout.key_text()
    digest = hashlib.sha256(text).hexdigest()[:32]
    name = f"step_{digest[:12]}"
    step = {"trace": trace, "digest": digest, "entries": entries}
    events.emit("program_missing", **step, name=name, outputs=outputs, aliases=aliases)
    make_room(len(entries))
    key = program_identity.cache_key(backend.client, text, name, layout.placement)
    executable = stored_programs.load(backend.client, key, name, layout.placement)
    from_cache = executable is not None
    program = None
    lowered = time.perf_counter()
    if executable is None:
        with progress_line.watching(name, len(entries)) as notice:
            with program_failures.costing():
                lowering = StepLowering(trace, entries, outputs, layout, name)
                notice.functions = lowering.functions
                programs, plan = (
                    lowering.stages() if lowering.in_stages() else ([lowering.whole()], None)
                )
            lowered = time.perf_counter()
            counters.sample("LoweringTime", (lowered - started) * 1e9)
            notice.stage = "compiling"
            compiled = [_compiled(backend, part, entries) for part in programs]
            program, executable = compiled[0]
            if plan is not None:
                parts = [part for _, part in compiled]
                executable = StagedExecutable(backend.client, name, parts, plan, program.placement)
                program = None
        compiling = time.perf_counter() - lowered
        counters.sample(metric, compiling * 1e9)
        counters.sample("InputOutputAliasCount", len(aliases), counters.render_number)
        counters.increment("UncachedCompile")
        stored_programs.store(key, executable)
    else:
        counters.increment("PersistentCacheHit")
    if isinstance(executable, StagedExecutable):
        aliases = executable.aliases
    if layout.num_replicas > 1:
        with program_failures.costing():
            executable = _over_replicas(backend, executable, name, layout.collectives)
    built = StepProgram(
        name=name,
        executable=executable,
        program=program,
        inputs=layout.input_specs(input_specs(backend, entries)),
        output_index=index,
        aliases=aliases,
        histogram=Counter(e.plan.name for e in entries if e.plan is not None),
        compile_seconds=time.perf_counter() - started,
        from_cache=from_cache,
        output_bytes=_sizes(entries, outputs),
        backend=backend,
        largest=program_failures.largest_values(entries),
    )
    if from_cache:
        events.emit("program_loaded", **step, program=built, loading=_ns(lowered - started))
    else:
        times = {"lowering": _ns(lowered - started), "compiling": _ns(compiling)}
        modules = tuple(part for part, _ in compiled)
        events.emit("program_compiled", **step, program=built, modules=modules, **times)
    return built


def _compiled(
    backend: Backend, program: Program, entries: Sequence[Entry]
) -> tuple[Program, Executable]:
    """A program's executable; functions whose calls XLA may have compiled wrongly are inlined.

    The program is the one that was compiled in the end.
    """
    # over a mesh all calls are inlined
    kept = kept_functions(program.stablehlo) if program.num_partitions == 1 else set()
    while True:
        try:
            executable = compile_program(backend.client, program)
        except Exception as error:
            values = program_failures.largest_values(entries)
            told = program_failures.explained(error, program.name, values)
            raise program_failures.costing_step(told) from (None if told is error else error)
        names = clashes(executable.optimized_hlo(), kept) if kept else set()
        if not names:
            return program, executable
        counters.increment(CLASH_COUNTER, len(names))
        kept -= names
        stablehlo = jax_private.inline_functions(program.stablehlo, names)
        program = dataclasses.replace(program, stablehlo=stablehlo)


def compile_program(client: DeviceClient, program: Program) -> Executable:
    """Compile a program, after the extensions that partition programs had their say."""
    partitioned = extensions().hook.xla_core_partition_program(program=program)
    return client.compile(partitioned or program)


def _over_replicas(
    backend: Backend, executable: Executable, name: str, collectives: Any
) -> Executable:
    """What runs ``executable``, which is over all replicas, on this replica's buffers.

    Raises RuntimeError when no extension knows how.
    """
    found = extensions().hook.xla_core_replicated_executable(
        executable=executable, name=name, collectives=collectives, backend=backend
    )
    if found is None:
        raise RuntimeError(f"{name} talks to other replicas: pip install xla-dist")
    return found  # type: ignore[no-any-return]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _sizes(entries: Sequence[Entry], outputs: Sequence[int]) -> dict[int, int]:
    """Bytes of the values ``outputs``, by their numbers."""
    sizes = {
        e.first + i: meta.nbytes
        for e in entries
        for i, meta in enumerate(e.metas)
        if meta is not None
    }
    return {vid: sizes[vid] for vid in outputs}


def key_text(
    entries: Sequence[Entry], outputs: Sequence[int], aliases: Sequence[tuple[int, int]]
) -> bytes:
    """The step in full, as text that is the same in every process: what the cache key is made of."""
    lines = list(map(_line, entries))
    lines.append(f"outputs {list(outputs)} aliases {list(aliases)}")
    return "\n".join(lines).encode()


def _line(entry: Entry) -> str:
    if entry.plan is None:
        return f"input {entry.metas[0]}"
    key = iter(entry.key)
    next(key)  # the plan's number, which is of this process alone
    words = [word.__name__ if isinstance(word, type) else repr(word) for word in key]
    return f"{entry.plan.name} {' '.join(words)} -> {entry.metas}"
