"""Measures one candidate: builds, records and compiles its step in this process."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from xla_core.contract.foreign_values import JsonObject
from xla_core.extension_api import programs, runtime
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_plan.compiled.figures import figures_of
from xla_plan.steps import optimizer_state
from xla_plan.steps.candidate import Candidate, Mesh, find_step, is_script
from xla_plan.steps.chip_memory import bytes_by_kind, part_of, states_of
from xla_plan.steps.script import run_script
from xla_plan.steps.step_flops import Flops, StepFlops

MSG_NO_PROGRAM: Final = (
    "{step} recorded nothing. A step function returns (model, optimizer, step), and calling step() records one "
    "training step; a script runs steps and calls torch_xla.sync()"
)
MSG_NOT_A_STEP: Final = (
    "{step} returned {kind}; a step function takes a mesh and returns (model, optimizer, step), where the "
    "optimizer may be None and an optional fourth element is the number of the step's model FLOPs"
)


def measure(step: str, candidate: Candidate, arguments: Iterable[str] = ()) -> dict[str, object]:
    """Build, record and compile a step; returns the figures of its program, as plain numbers.

    The environment names the topology (``plans.ask_worker`` sets it). ``arguments`` are those of a script. Raises
    what the step function raises, and RuntimeError with the compiler's message if it refuses the program.
    """
    began = time.perf_counter()
    if is_script(step):
        watch = run_script(step, list(arguments))
        program = _main_program(step, programs.all_programs())
        flops = watch.flops.get(program.name, Flops())
        recorded = _recorded(watch.parts, flops.model or None, flops)
    else:
        recorded, before = _record(step, candidate)
        program = _main_program(step, [p for p in programs.all_programs() if p not in before])
    figures = of_program(program, candidate)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **figures,
        **recorded,
        "seconds": {
            "all": time.perf_counter() - began,
            "compile": program.compile_seconds,
            # of the whole process, which has imported torch before; other work on the machine does not count
            "processor": used.ru_utime + used.ru_stime,
        },
        "from_cache": program.from_cache,
        "host_peak_bytes": used.ru_maxrss * 1024,
    }


def _main_program(step: str, compiled: Sequence[programs.StepProgram]) -> programs.StepProgram:
    """The program that runs most often, or the largest of these: of a script it is the training step."""
    if not compiled:
        raise RuntimeError(MSG_NO_PROGRAM.format(step=step))
    return max(compiled, key=lambda p: (p.runs, p.operations))


def _recorded(parts: dict[str, int], model: float | None, flops: Flops) -> dict[str, object]:
    return {"parts": parts, "model_flops": model, "recorded_flops": flops.all or None}


def shapes(
    step: str, meshes: Iterable[Mesh], topology: str, options: Mapping[str, object]
) -> JsonObject:
    """How the parameters are split over each mesh, and their bytes, without recording a step.

    The ``parameters`` of a row are triples: the whole shape, the shape of one chip's part, and for each dimension
    the axes over which it is split. ``padding`` is how much larger all parts of a batch are than the batch (1.0:
    it divides). The row of a mesh that the step function refuses has an ``error``.
    """
    xr.use_spmd()
    rows = []
    for axes in meshes:
        try:
            rows.append(_shapes_of(step, Candidate(topology, axes, options)))
        except Exception as error:
            rows.append({"error": f"{type(error).__name__}: {error}"})
        gc.collect()
    return {"limit": runtime.client().memory_info(0).bytes_limit, "rows": rows}


def _shapes_of(step: str, candidate: Candidate) -> dict[str, object]:
    model, optimizer, run, flops = _built(step, candidate)
    rows = [(list(p.shape), list(part_of(p)), _axes_of(p)) for p in model.parameters()]
    padding = max((_padding(t, dict(candidate.mesh)) for t in _data(model, optimizer)), default=1.0)
    del run  # it keeps the data
    return {
        "parts": bytes_by_kind(model.parameters(), model.buffers(), optimizer),
        "parameters": rows,
        "model_flops": flops,
        "padding": padding,
    }


def _data(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The split tensors that are neither the model's nor the optimizer's."""
    own = (*model.parameters(), *model.buffers(), *states_of(optimizer))
    known = {id(storage_of(t)) for t in own if isinstance(t, XLATensor)}
    alive = [t for t in gc.get_objects() if issubclass(type(t), XLATensor) and t.numel()]
    return [t for t in alive if id(storage_of(t)) not in known and any(_axes_of(t))]


def _padding(tensor: torch.Tensor, sizes: Mapping[str, int]) -> float:
    """How much larger all different parts of a tensor are than the tensor."""
    pieces = math.prod(sizes.get(axis, 1) for axes in _axes_of(tensor) for axis in axes)
    return math.prod(part_of(tensor)) * pieces / tensor.numel()


def _axes_of(parameter: torch.Tensor) -> list[list[str]]:
    """The names of the axes over which each dimension is split."""
    marked = xs.wrap_if_sharded(parameter)
    if not isinstance(marked, xs.XLAShardedTensor):
        return [[] for _ in parameter.shape]
    names = marked.mesh.axis_names
    several = [entry if isinstance(entry, tuple) else (entry,) for entry in marked.partition_spec]
    return [
        [names[axis] if isinstance(axis, int) else axis for axis in axes if axis is not None]
        for axes in several
    ]


def _built(
    step: str, candidate: Candidate
) -> tuple[torch.nn.Module, torch.optim.Optimizer | None, Callable[[], object], float | None]:
    """Call the step function, and give its optimizer the state that it has after the first step."""
    make = find_step(step)
    mesh = None
    if candidate.mesh:
        xr.use_spmd()
        devices = xr.global_runtime_device_count()
        candidate.check(devices)
        names, sizes = zip(*candidate.mesh, strict=True)
        mesh = xs.Mesh(np.arange(devices), sizes, names)
        xs.set_global_mesh(mesh)
    built = make(mesh, **candidate.options)
    if not isinstance(built, tuple) or len(built) not in (3, 4) or not callable(built[2]):
        raise TypeError(MSG_NOT_A_STEP.format(step=step, kind=type(built).__name__))
    model, optimizer, run = built[:3]
    if optimizer is not None:
        optimizer_state.fill(optimizer, mesh)
    torch_xla.sync()
    return model, optimizer, run, built[3] if len(built) == 4 else None


def _record(step: str, candidate: Candidate) -> tuple[JsonObject, list[programs.StepProgram]]:
    """Record a step and compile it; returns its bytes by kind and FLOPs, and the programs from before."""
    model, optimizer, run, flops = _built(step, candidate)
    before = programs.all_programs()
    count = StepFlops()
    kept = _counted(run, count)
    torch_xla.sync()
    del kept
    parts = bytes_by_kind(model.parameters(), model.buffers(), optimizer)
    return _recorded(parts, flops or count.flops.model, count.flops), before


def _counted(run: Callable[[], object], count: StepFlops) -> object:
    with count:
        return run()


def of_program(program: programs.StepProgram, candidate: Candidate) -> dict[str, object]:
    """The figures of one compiled program on one chip."""
    devices = len(runtime.client().devices())
    slices = int(candidate.topology.partition("*")[2] or 1)
    return {
        "program": program.name,
        "limit": runtime.client().memory_info(0).bytes_limit,
        "operations": program.operations,
        **figures_of(program.executable, devices, slices),
    }
