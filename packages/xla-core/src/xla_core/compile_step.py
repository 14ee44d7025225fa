"""Makes the program of a step: from the persistent cache if it is there, else lowered and compiled."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from xla_core import _jax_compat, compile_notice, counters, events, flags, settings, where
from xla_core.dtypes import kept_as, numpy_dtype
from xla_core.layout import Layout
from xla_core.lowering.evaluate import Scope
from xla_core.lowering.outline import KEPT_PREFIX
from xla_core.lowering.partitioned import PartitionedScope
from xla_core.lowering.repeats import CostModel
from xla_core.lowering.step import needed_entries, outlined_step_function, step_function
from xla_core.metas import TensorMeta
from xla_core.programs import StepProgram
from xla_core.protocol import ArraySpec, DeviceClient, Outlining, Program
from xla_core.trace import Entry, Marker, Trace

if TYPE_CHECKING:
    from xla_core.runtime import Backend


def build(
    trace: Trace, outputs: tuple[int, ...], pairs: tuple[tuple[int, int], ...]
) -> StepProgram:
    """The program that computes ``outputs`` of the step that ends at the trace's current entry."""
    started = time.perf_counter()
    compiling = 0.0
    entries = trace.cur.path()
    index = {vid: i for i, vid in enumerate(outputs)}
    aliases = tuple((slot, index[vid]) for slot, vid in pairs)
    backend = trace.backend
    layout = backend.layout(trace, entries, outputs, aliases)
    aliases = layout.aliases
    text = key_text(entries, outputs, aliases) + f"\n{outlining_of(backend.client)}".encode()
    text += settings.key_text(backend.formats) + layout.key_text()
    digest = hashlib.sha256(text).hexdigest()[:32]
    name = f"step_{digest[:12]}"
    step = {"trace": trace, "digest": digest, "entries": entries}
    events.emit("program_missing", **step, name=name, outputs=outputs, aliases=aliases)
    key = backend.cache_key(text, name, layout.placement)
    executable = backend.load(key, name, layout.placement)
    from_cache = executable is not None
    program = None
    lowered = time.perf_counter()
    if executable is None:
        with compile_notice.watching(name, len(entries)) as notice:
            program, notice.functions = lower(trace, entries, outputs, layout, name)
            lowered = time.perf_counter()
            counters.sample("LoweringTime", (lowered - started) * 1e9)
            notice.stage = "compiling"
            executable = backend.compile(program)
        compiling = time.perf_counter() - lowered
        counters.sample("CompileTime", compiling * 1e9)
        counters.sample("InputOutputAliasCount", len(aliases), counters.render_number)
        counters.increment("UncachedCompile")
        backend.store(key, executable)
    else:
        counters.increment("PersistentCacheHit")
    if layout.num_replicas > 1:
        executable = backend.over_replicas(executable, name, layout.collectives)
    sizes = _sizes(entries)
    built = StepProgram(
        name=name,
        executable=executable,
        program=program,
        inputs=layout.input_specs(_input_specs(backend, entries)),
        output_index=index,
        aliases=aliases,
        histogram=Counter(e.plan.name for e in entries if e.plan is not None),
        compile_seconds=time.perf_counter() - started,
        from_cache=from_cache,
        output_bytes={vid: sizes[vid] for vid in outputs},
        backend=backend,
    )
    if from_cache:
        events.emit("program_loaded", **step, program=built, loading=_ns(lowered - started))
    else:
        times = {"lowering": _ns(lowered - started), "compiling": _ns(compiling)}
        events.emit("program_compiled", **step, program=built, **times)
    return built


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _sizes(entries: Sequence[Entry]) -> dict[int, int]:
    return {
        e.first + i: meta.nbytes
        for e in entries
        for i, meta in enumerate(e.metas)
        if meta is not None
    }


def _spec(backend: Backend, meta: TensorMeta | None) -> ArraySpec:
    assert meta is not None
    return ArraySpec(meta.shape, backend.numpy_dtype(numpy_dtype(meta.dtype)))


def _input_specs(backend: Backend, entries: Sequence[Entry]) -> tuple[ArraySpec, ...]:
    """The program's arguments: the step's inputs, then the vectors of lifted floats and ints."""
    inputs = [_spec(backend, e.metas[0]) for e in entries if e.plan is None]
    last = entries[-1]
    for count, dtype in ((last.floats, torch.float64), (last.ints, torch.int64)):
        if count:
            inputs.append(ArraySpec((count,), backend.client.numpy_dtype(numpy_dtype(dtype))))
    return tuple(inputs)


def lower(
    trace: Trace,
    entries: Sequence[Entry],
    outputs: tuple[int, ...],
    layout: Layout,
    name: str,
) -> tuple[Program, int]:
    """The program that computes ``outputs`` of a step, and how many functions it has."""
    needed = needed_entries(entries, outputs)
    backend = trace.backend
    last = entries[-1]
    inputs = _input_specs(backend, entries)
    metas = {e.first + i: m for e in entries for i, m in enumerate(e.metas)}
    scalars = (bool(last.floats), bool(last.ints))
    # partitioners look at one call at a time: a function of its own would have to be as each calls it
    outlining = outlining_of(backend.client) if layout.num_partitions == 1 else None
    functions = 0
    if outlining is None:
        scope = PartitionedScope if layout.num_partitions > 1 else Scope
        function = step_function(needed, outputs, *scalars, scope)
    else:
        model = CostModel(float(outlining.min_operations), float(outlining.min_saved))
        function, functions = outlined_step_function(needed, outputs, *scalars, model)
    with kept_as(backend.numpy_dtype), settings.matmul_precision(), layout.lowering():
        stablehlo = _jax_compat.lower(
            function,
            inputs,
            layout.aliases,
            backend.platform,
            name,
            num_replicas=layout.num_replicas,
            num_partitions=layout.num_partitions,
            input_shardings=layout.input_annotations,
            output_shardings=layout.output_annotations,
            kept_prefix=KEPT_PREFIX if functions else None,
            relocate=where.relocation(entries),
        )
    program = Program(
        name=name,
        stablehlo=stablehlo,
        inputs=layout.input_specs(inputs),
        outputs=layout.output_specs(tuple(_spec(backend, metas[vid]) for vid in outputs)),
        aliases=layout.aliases,
        placement=layout.placement,
        num_replicas=layout.num_replicas,
        num_partitions=layout.num_partitions,
        options={
            **(outlining.options if outlining is not None and functions else {}),
            **settings.custom_compile_options(),
        },
    )
    return program, 1 + functions


def outlining_of(client: DeviceClient) -> Outlining | None:
    """How repeats become functions on this device, or None if they do not; the user may decide."""
    found: Outlining = getattr(client, "outlining", Outlining())
    chosen = flags.OUTLINE_REPEATS.get()
    return found if (found.wanted if chosen is None else chosen) else None


def key_text(
    entries: Sequence[Entry], outputs: Sequence[int], aliases: Sequence[tuple[int, int]]
) -> bytes:
    """The step in full, as text that is the same in every process: what the cache key is made of."""
    lines = [" ".join(_words(entry)) for entry in entries]
    lines.append(f"outputs {list(outputs)} aliases {list(aliases)}")
    return "\n".join(lines).encode()


def _words(entry: Entry) -> Iterator[str]:
    if entry.plan is None:
        yield f"input {entry.metas[0]}"
        return
    yield entry.plan.name
    for item in entry.key[1:]:
        if isinstance(item, type):
            yield item.__name__
        elif isinstance(item, Marker):
            yield item.name
        else:
            yield repr(item)
    yield f"-> {entry.metas}"


@functools.cache
def lowering_version() -> bytes:
    """A digest of all that decides how a step is lowered: our rules, torch's and jax's versions."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(torch.__version__.encode())
    digest.update(importlib.metadata.version("jax").encode())
    return digest.digest()
