"""Makes the program of a step: loads it from the persistent cache, or lowers and compiles it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, TypedDict

from xla_core.compilation import (
    compile_threads,
    program_identity,
    progress_line,
    stored_programs,
)
from xla_core.compilation.program_table import Making, StepProgram, drop, make_room
from xla_core.compilation.staged_executable import StagedExecutable
from xla_core.contract import events
from xla_core.contract.device_protocol import (
    DeviceClient,
    Executable,
    Program,
    capabilities_of,
)
from xla_core.contract.foreign_values import ForeignObject
from xla_core.jax_bridge import jax_private
from xla_core.lowering import program_failures
from xla_core.lowering.call_alias_check import clashes, kept_functions
from xla_core.lowering.stage_schedule import Schedule
from xla_core.lowering.step_program import StepLowering, input_specs
from xla_core.lowering.step_verifier import verify
from xla_core.operators.extensions import extensions
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.storage import Backend
from xla_core.recording.trace import Trace
from xla_core.support import counters, flight_ring

CLASH_COUNTER: Final = "RepeatInlined"
"""The counter of functions that were inlined because XLA may have compiled their calls wrongly."""


def build(
    trace: Trace,
    outputs: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    metric: str = "CompileTime",
    beside: bool = False,
) -> StepProgram:
    """The program that computes ``outputs`` of the step that ends at the trace's current entry.

    ``pairs`` are donations: the slot of an input, and the number of the wanted value that may reuse its memory.
    ``metric`` (default: ``"CompileTime"``) receives the time of compiling. Raises InvalidStepError for a step that
    violates an invariant, LoweringError if a rule fails, and RuntimeError with the compiler's message.

    With ``beside`` (default: False), a program that is not stored is only lowered when this returns, and compiled
    in another thread (see ``StepProgram.making``). Listeners are notified when ``Making.tell`` is called.
    """
    compilation = Compilation(trace, outputs, pairs)
    compilation.identify()
    name, operations = compilation.name, len(compilation.entries)
    with contextlib.ExitStack() as watching:
        record = flight_ring.begin(flight_ring.COMPILE, name, operations)
        watching.callback(flight_ring.end, record)
        if not compilation.look_up():
            notice = watching.enter_context(progress_line.watching(name, operations))
            compilation.lower(notice)
            if beside:
                return compilation.compile_beside(notice, watching.pop_all(), metric)
            compilation.compile(notice)
            compilation.store(metric)
        return compilation.install()


class _Facts(TypedDict):
    trace: Trace
    program: StepProgram
    digest: str


class Compilation:
    """The compilation of one step; the methods are called in the order in which they are defined."""

    name: str
    executable: ForeignObject = None  # an ``Executable``, once there is one
    program: Program | None = None
    modules: tuple[Program, ...] = ()
    _schedule: Schedule | None = None

    def __init__(
        self, trace: Trace, outputs: tuple[int, ...], pairs: tuple[tuple[int, int], ...]
    ) -> None:
        self.trace = trace
        self.backend = trace.backend
        self.beside = capabilities_of(self.backend.client).compiles_beside
        self.entries = trace.cur.path()
        self.outputs = outputs
        self.index = {vid: i for i, vid in enumerate(outputs)}
        self.aliases = tuple((slot, self.index[vid]) for slot, vid in pairs)
        self._started = time.perf_counter()
        self._lowered = self._compiled = 0.0

    def identify(self) -> None:
        """Verify the step, decide its layout over devices, and determine its name and its key."""
        verify(self.entries, self.outputs, self.aliases)
        backend = self.backend
        with program_failures.costing():
            layout = backend.layout(self.trace, self.entries, self.outputs, self.aliases)
        self.layout = layout
        self.aliases = layout.aliases
        text = key_text(self.entries, self.outputs, self.aliases)
        identity = program_identity.of_step(backend, text, layout)
        digest = identity.digest()
        self.name = f"step_{digest[:12]}"
        self._digest = digest
        missing = events.ProgramMissing(
            trace=self.trace, name=self.name, digest=digest, entries=self.entries,
            outputs=self.outputs, aliases=self.aliases,
        )  # fmt: skip
        events.emit(missing)
        make_room(len(self.entries))
        self.key = identity.cache_key(self.name, layout.placement)

    def look_up(self) -> bool:
        """Load the executable from the persistent cache; returns whether it was there."""
        client, placement = self.backend.client, self.layout.placement
        self.executable = stored_programs.load(client, self.key, self.name, placement)
        self._lowered = time.perf_counter()
        is_stored = self.executable is not None
        if is_stored:
            counters.increment("PersistentCacheHit")
        return is_stored

    def lower(self, notice: progress_line.Notice) -> None:
        """Lower the step to StableHLO: one module, or one for each kind of stage with their schedule."""
        with program_failures.costing(refused=True):
            lowering = StepLowering(self.trace, self.entries, self.outputs, self.layout, self.name)
            notice.functions = lowering.functions
            if lowering.in_stages():
                modules, self._schedule = lowering.stages()
            else:
                modules, self._schedule = [lowering.whole()], None
        self.modules = tuple(modules)
        self._lowered = time.perf_counter()
        counters.sample("LoweringTime", (self._lowered - self._started) * 1e9)

    def compile(self, notice: progress_line.Notice) -> None:
        """Compile the modules (stages concurrently), and combine stages into one executable."""
        notice.stage = "compiling"
        one = functools.partial(_compiled, self.backend, entries=self.entries)
        works = [functools.partial(one, module) for module in self.modules]
        compiled = compile_threads.run_each(works) if self.beside else [work() for work in works]
        self.modules = tuple(module for module, _ in compiled)
        if self._schedule is None:
            self.program, self.executable = compiled[0]
        else:
            parts = [part for _, part in compiled]
            placement = self.modules[0].placement
            self.executable = StagedExecutable(
                self.backend.client, self.name, parts, self._schedule, placement
            )

    def store(self, metric: str) -> None:
        """Count the compilation, record its time as ``metric``, and store its result in the persistent cache."""
        self._compiled = time.perf_counter() - self._lowered
        counters.sample(metric, self._compiled * 1e9)
        counters.sample("InputOutputAliasCount", len(self.aliases), counters.render_number)
        counters.increment("UncachedCompile")
        stored_programs.store(self.key, self.executable)

    def compile_beside(
        self, notice: progress_line.Notice, watching: contextlib.ExitStack, metric: str
    ) -> StepProgram:
        """The step's program; a thread calls ``compile`` and ``store`` for it, and then closes ``watching``."""
        self.trace = self.trace.detached()
        built = self._program()

        def rest() -> None:
            try:
                with watching:
                    self.compile(notice)
                    self.store(metric)
            except BaseException:
                drop(built)
                raise
            built.made(self.executable, self.program, time.perf_counter() - self._started)

        built.await_making(
            Making(compile_threads.submit(rest), functools.partial(self._tell, built))
        )
        return built

    def install(self) -> StepProgram:
        """The step's program, with all information that its runs and reports need."""
        built = self._program()
        self._tell(built)
        return built

    def _program(self) -> StepProgram:
        aliases, executable = self.aliases, self.executable
        if self._schedule is not None:
            aliases = self._schedule.aliases
        elif isinstance(executable, StagedExecutable):
            aliases = executable.aliases
        if self.layout.num_replicas > 1:
            with program_failures.costing():
                executable = _over_replicas(
                    self.backend, executable, self.name, self.layout.collectives
                )
        return StepProgram(
            name=self.name,
            executable=executable,
            program=self.program,
            inputs=self.layout.input_specs(input_specs(self.backend, self.entries)),
            output_index=self.index,
            aliases=aliases,
            histogram=Counter(e.plan.name for e in operations_of(self.entries)),
            compile_seconds=time.perf_counter() - self._started,
            from_cache=not self.modules,
            output_bytes=output_bytes(self.entries, self.outputs),
            backend=self.backend,
            largest=program_failures.largest_values(self.entries),
        )

    def _tell(self, built: StepProgram) -> None:
        """Notify listeners of the program."""
        preparing = _ns(self._lowered - self._started)
        facts: _Facts = {"trace": self.trace, "program": built, "digest": self._digest}
        if built.from_cache:
            loaded = events.ProgramLoaded(**facts, entries=self.entries, loading=preparing)
            events.emit(loaded)
        else:
            compiled = events.ProgramCompiled(
                **facts, entries=self.entries, modules=self.modules,
                lowering=preparing, compiling=_ns(self._compiled),
            )  # fmt: skip
            events.emit(compiled)


def _compiled(
    backend: Backend, program: Program, entries: Sequence[Entry]
) -> tuple[Program, Executable]:
    """Compile a program; functions whose calls XLA may have compiled wrongly are inlined.

    Returns the program that was finally compiled, and its executable.
    """
    # over a mesh all calls are inlined
    kept = kept_functions(program.stablehlo) if program.num_partitions == 1 else set()
    while True:
        try:
            executable = compile_program(backend.client, program)
        except Exception as error:
            values = program_failures.largest_values(entries)
            explained = program_failures.explained(error, program.name, values)
            with program_failures.costing(refused=True):
                raise explained from (None if explained is error else error)
        names = clashes(executable.optimized_hlo(), kept) if kept else set()
        if not names:
            return program, executable
        counters.increment(CLASH_COUNTER, len(names))
        kept -= names
        stablehlo = jax_private.inline_functions(program.stablehlo, names)
        program = dataclasses.replace(program, stablehlo=stablehlo)


def compile_program(client: DeviceClient, program: Program) -> Executable:
    """Compile a program; extensions may partition it first."""
    partitioned = extensions().hook.xla_core_partition_program(program=program)
    return client.compile(partitioned or program)


def refusal(trace: Trace, outputs: tuple[int, ...]) -> Exception | None:
    """The error of lowering or compiling a program that computes ``outputs``; None if there is none.

    The program is thrown away: nothing is counted or stored, and listeners are not notified.
    """
    entries = trace.cur.path()
    try:
        layout = trace.backend.layout(trace, entries, outputs, ())
        program = StepLowering(trace, entries, outputs, layout, "trial").whole()
        compile_program(trace.backend.client, program)
    except Exception as error:
        return error.with_traceback(None)
    return None


def _over_replicas(
    backend: Backend, executable: Executable, name: str, collectives: object
) -> Executable:
    """An executable that runs ``executable``, which spans all replicas, with this replica's buffers.

    Raises RuntimeError if no extension provides one.
    """
    replicated = extensions().hook.xla_core_replicated_executable(
        executable=executable, name=name, collectives=collectives, backend=backend
    )
    if replicated is None:
        raise RuntimeError(
            f"{name} communicates with other replicas, which needs: pip install xla-dist"
        )
    return replicated  # type: ignore[no-any-return]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def output_bytes(entries: Sequence[Entry], outputs: Sequence[int]) -> dict[int, int]:
    """The sizes in bytes of the values ``outputs``, by their numbers."""
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
    """The complete step as text that is the same in every process, for the cache key.

    ``entries`` are all of its inputs and operations, ``outputs`` the numbers of the wanted values, ``aliases``
    the pairs of the slot of an input and the position of the output that reuses its memory.
    """
    lines = list(map(_line, entries))
    lines.append(f"outputs {list(outputs)} aliases {list(aliases)}")
    return "\n".join(lines).encode()


def _line(entry: Entry) -> str:
    if not isinstance(entry, Operation):
        return f"input {entry.metas[0]}"
    key = iter(entry.key)
    next(key)  # the plan's number, which differs from process to process
    words = [word.__name__ if isinstance(word, type) else repr(word) for word in key]
    return f"{entry.plan.name} {' '.join(words)} -> {entry.metas}"
