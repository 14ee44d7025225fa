"""Turns a recorded step into one program, or into several that run one after another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from xla_core.contract.device_protocol import (
    ArraySpec,
    DeviceClient,
    Loops,
    Outlining,
    Program,
    capabilities_of,
)
from xla_core.jax_bridge import jax_private
from xla_core.jax_bridge.passes.composites import build_composites
from xla_core.lowering import compile_settings
from xla_core.lowering.evaluate import Scope
from xla_core.lowering.loops.emit import looped_function
from xla_core.lowering.loops.items import Step
from xla_core.lowering.loops.worth import Worth
from xla_core.lowering.outline_functions import KEPT_PREFIX, outlined_function
from xla_core.lowering.repeat_graph import Graph
from xla_core.lowering.repeats.items import CostModel, Plan
from xla_core.lowering.replay import loops_of, needed_entries, repeats_of, step_function
from xla_core.lowering.source_scopes import relocation
from xla_core.lowering.spmd_matmul_scope import PartitionedScope
from xla_core.lowering.stage_partition import VECTORS, cut, stage_count
from xla_core.lowering.stage_schedule import Schedule, schedule
from xla_core.operators.lowering_registry import Rule
from xla_core.operators.target import lowering_for
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, inputs_of, operations_of
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Backend
from xla_core.recording.trace import Trace
from xla_core.support import flags
from xla_core.torch_bridge.dtypes import kept_as, numpy_dtype
from xla_core.torch_bridge.op_library import MARK


def _spec(backend: Backend, meta: TensorMeta | None) -> ArraySpec:
    assert meta is not None
    return ArraySpec(meta.shape, backend.numpy_dtype(numpy_dtype(meta.dtype)))


def _nbytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def input_specs(backend: Backend, entries: Sequence[Entry]) -> tuple[ArraySpec, ...]:
    """The program's arguments: the step's inputs, then the vectors of lifted floats and ints."""
    metas = [entry.meta for entry in inputs_of(entries)]
    specs = {meta: _spec(backend, meta) for meta in dict.fromkeys(metas)}
    inputs = [specs[meta] for meta in metas]
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
) -> Program:
    """One program that computes ``outputs`` of a step, even if the step would run in stages.

    ``entries`` are all entries of the step, whose inputs are the program's arguments. ``trace`` is that of the
    device, ``layout`` says how the program is laid out over devices, ``name`` is its name. Raises LoweringError if
    a rule fails.
    """
    return StepLowering(trace, entries, outputs, layout, name).whole()


class StepLowering:
    """The lowering of one step to one program, ``whole()``, or to several, ``stages()``, if ``in_stages()``.

    With ``flat`` (default: False), repeats become neither functions nor loops.
    """

    def __init__(
        self,
        trace: Trace,
        entries: Sequence[Entry],
        outputs: tuple[int, ...],
        layout: Layout,
        name: str,
        flat: bool = False,
    ) -> None:
        self.backend = trace.backend
        self.entries = entries
        self.outputs = outputs
        self.layout = layout
        self.name = name
        self.needed = needed_entries(entries, outputs)
        self.metas = {e.first + i: m for e in entries for i, m in enumerate(e.metas)}
        plans = [operation.plan for operation in operations_of(self.needed)]
        self.marked = any(plan.name == MARK for plan in plans)
        whole = {p.rule.in_loops for p in plans if isinstance(p.rule, Rule) and p.rule.whole_step}
        self.outlining = Outlining() if flat else outlining_of(trace.backend.client)
        self.loops: tuple[Graph, list[Step]] | None = None
        self.repeats: tuple[Graph, Plan] | None = None
        sizes = (self.outlining.min_operations, self.outlining.min_saved)
        model = CostModel(*map(float, sizes))
        loops = self.outlining.loops
        if loops is not None and "no" not in whole:
            given = [entry.first for entry in inputs_of(entries)]
            pays = Worth(loops, self.metas, given, layout.gathered)
            self.loops = loops_of(self.needed, outputs, model, loops.min_trips, pays)
        if self.outlining.wanted and self.loops is None and not whole:
            self.repeats = repeats_of(self.needed, outputs, model, self.outlining.never_inside)

    @property
    def kept(self) -> bool:
        """Whether repeats remain functions in the compiler.

        A partitioner decides for each call how its values are split, so it gets the calls inlined. The
        functions are still lowered only once.
        """
        return self.repeats is not None and self.layout.num_partitions == 1

    @property
    def functions(self) -> int:
        """The number of functions that are compiled."""
        return 1 + (len(self.repeats[1].functions) if self.repeats is not None and self.kept else 0)

    def in_stages(self) -> bool:
        """Whether the step should be compiled as several programs."""
        outlining = self.outlining
        if self.repeats is None or outlining.min_staged is None:
            return False
        if self.layout.num_replicas > 1 or self.layout.num_partitions > 1:
            # replicas agree on whole programs, and partitioners need to see whole programs
            return False
        graph, plan = self.repeats
        operations, stages = len(graph.nodes), stage_count(plan)
        return operations >= max(outlining.min_staged, stages * outlining.min_stage)

    def whole(self) -> Program:
        """One program, with its repeats as loops or functions."""
        last = self.entries[-1]
        scalars = (bool(last.floats), bool(last.ints))
        scope = PartitionedScope if self.layout.num_partitions > 1 else Scope
        if self.loops is not None:
            function = looped_function(*self.loops, self.outputs, self.metas, *scalars, scope)
        elif self.repeats is not None:
            function = outlined_function(*self.repeats, self.outputs, *scalars, scope)
        else:
            function = step_function(self.needed, self.outputs, *scalars, scope)
        return self.program_of(
            function, input_specs(self.backend, self.entries), self.output_specs()
        )

    def output_specs(self) -> tuple[ArraySpec, ...]:
        """Shapes and dtypes of the program's results."""
        return tuple(_spec(self.backend, self.metas[vid]) for vid in self.outputs)

    def program_of(
        self,
        function: Callable[..., object],
        inputs: tuple[ArraySpec, ...],
        outputs: tuple[ArraySpec, ...],
    ) -> Program:
        """One program from a jax function that computes the step and takes ``inputs`` to ``outputs``."""
        shapes = {meta.shape for meta in self.metas.values() if meta is not None}
        largest = max(map(math.prod, shapes), default=0)
        return self._program(self.name, function, inputs, outputs, self.layout.aliases, largest)

    def stages(self) -> tuple[list[Program], Schedule]:
        """Several programs, and the schedule in which they run."""
        assert self.repeats is not None
        given = [entry.first for entry in inputs_of(self.entries)]
        donations = {given[slot]: self.outputs[target] for slot, target in self.layout.aliases}
        plan = cut(*self.repeats, self.outputs, donations, self.outlining.most_stages)
        last = self.entries[-1]
        vectors = ((VECTORS[True], last.floats), (VECTORS[False], last.ints))
        order = [*given, *(vid for vid, count in vectors if count)]
        specs = dict(zip(order, input_specs(self.backend, self.entries), strict=True))

        def spec(vid: int) -> ArraySpec:
            known = specs.get(vid)
            return _spec(self.backend, self.metas[vid]) if known is None else known

        programs = [
            self._program(
                f"{self.name}_{program.name}",
                program.function,
                (
                    *map(spec, program.inputs),
                    *[ArraySpec((), np.dtype(np.uint32))] * program.indices,
                ),
                tuple(map(spec, program.outputs)),
                program.aliases,
                runs=len(plan.stages),
            )
            for program in plan.programs
        ]
        kept = plan.donated()
        aliases = tuple(pair for pair in self.layout.aliases if given[pair[0]] in kept)
        return programs, schedule(plan, order, self.outputs, aliases, lambda v: _nbytes(spec(v)))

    def _program(
        self,
        name: str,
        function: Callable[..., object],
        inputs: tuple[ArraySpec, ...],
        outputs: tuple[ArraySpec, ...],
        aliases: tuple[tuple[int, int], ...],
        largest: int | None = None,
        runs: int = 1,
    ) -> Program:
        layout, backend = self.layout, self.backend
        edged, arguments = layout.edges(function, inputs)
        target = dataclasses.replace(backend.target, partitions=layout.num_partitions)
        with (
            kept_as(backend.numpy_dtype),
            compile_settings.matmul_precision(),
            lowering_for(target),
            layout.lowering(),
        ):
            stablehlo = jax_private.lower(
                edged,
                arguments,
                aliases,
                backend.platform,
                name,
                num_replicas=layout.num_replicas,
                num_partitions=layout.num_partitions,
                input_shardings=layout.inputs,
                output_shardings=layout.outputs,
                mesh_of=layout.mesh_of,
                kept_prefix=KEPT_PREFIX if self.kept else None,
                relocate=relocation(),
                edit=build_composites if self.marked else None,
            )
        return Program(
            name=name,
            stablehlo=stablehlo,
            inputs=layout.input_specs(inputs),
            outputs=layout.output_specs(outputs),
            aliases=aliases,
            placement=layout.placement,
            num_replicas=layout.num_replicas,
            num_partitions=layout.num_partitions,
            options={
                **(self.outlining.options if self.kept else {}),
                **compile_settings.custom_compile_options(),
            },
            largest=largest,
            runs=runs,
        )


def outlining_of(client: DeviceClient) -> Outlining:
    """How repeats are lowered on this device. The user's flags override the device."""
    outlining = capabilities_of(client).outlining
    chosen, staged = flags.OUTLINE_REPEATS.get(), flags.STEP_STAGES.get()
    looped = flags.LOOP_REPEATS.get()
    if staged is not None:
        outlining = dataclasses.replace(outlining, min_staged=0 if staged else None, min_stage=0)
    if looped is not None:
        outlining = dataclasses.replace(outlining, loops=Loops() if looped else None)
    return outlining if chosen is None else dataclasses.replace(outlining, wanted=chosen)
