"""Graphs of ``torch.compile``: recorded once, compiled to one program, and run without recording again.

``extract_compiled_graph`` is what PyTorch's own backend ``openxla`` calls. The graph is run once on stand-ins
of its arguments, whose values nothing may read; what that records becomes the program. A graph that needs
a value on the way (an operator that runs on the CPU) cannot be one program: it is cut there, and the parts
become programs (``graph_partition``). What is left over, such as results on other devices, is recorded on every
call like any other code on ``xla`` tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Final

import torch
from jax import Array
from torch import fx
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from xla_core.compilation.program_identity import ProgramIdentity, in_memory
from xla_core.compilation.program_table import StepProgram
from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.contract.foreign_values import AnyFunction
from xla_core.dynamo import lost_order, settings
from xla_core.dynamo.graph_partition import MSG_UNREADABLE, one_part, partition
from xla_core.dynamo.graph_program import (
    Constant,
    Fresh,
    GraphProgram,
    NotOneProgramError,
    Passed,
    Shared,
    copied_view,
    program_of_step,
)
from xla_core.execution import deferred_steps, eager_mode, operator_counts, run_step, runtime
from xla_core.launching import buffer_donation
from xla_core.operators.error_messages import ValueNeededError
from xla_core.recording import random_state
from xla_core.recording.evictable import Table
from xla_core.recording.step_record import Rules
from xla_core.recording.storage import Storage, chain, replacing
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.support import caches, counters, flags, indivisible
from xla_core.torch_bridge.operands import Operand, Operands
from xla_core.torch_bridge.torch_private import without_dispatch_modes

MSG_PENDING: Final = (
    "input data to dynamo graph can not be a pending ir, please set "
    "`torch_xla._dynamo.config.skip_input_data_check` to False"
)

# References to an argument's buffer when its storage alone keeps it: the storage, the list of
# arguments, getrefcount's own.
_STORAGE_ONLY: Final = 3


class CompiledGraph:
    """A callable that runs an FX graph on ``xla`` tensors, one program per set of argument shapes.

    Or several, where operators of it run on the CPU in between.
    """

    def __init__(self, model: AnyFunction) -> None:
        lost_order.check_graph(model)
        self._model = model
        self._writes = lost_order.written_arguments(model)
        self._known = Table()

    def __call__(self, *args: Operand) -> Operand:
        """The graph's results for these arguments, enqueued."""
        args = _with_scalars_on_device(args)
        if self._writes:
            lost_order.check_arguments(args, self._writes)
        if flags.CHECK_INDICES.get():
            return self._model(*args)  # recorded on every call, and checked like all that is
        trace = _trace_of(args)
        with trace.lock:
            key = _key(args, trace)
            recorded = self._known.get(key)
            if recorded is None:
                with torch.no_grad():
                    recorded = self._extract(key, args, trace)
            if isinstance(recorded, GraphProgram):
                return _run(recorded, args, trace)
        if recorded is self._model:
            counters.increment("DynamoGraphRecordedAgain")
        return recorded(*args)

    def prepare(self, args: Sequence[Operand]) -> None:
        """Make the program for arguments like ``args`` now."""
        if flags.CHECK_INDICES.get():
            return
        args = _with_scalars_on_device(tuple(args))
        trace = _trace_of(args)
        with trace.lock, torch.no_grad():
            self._extract(_key(args, trace), args, trace)

    def _extract(self, key: object, args: Operands, trace: Trace) -> GraphProgram | AnyFunction:
        """The graph as one program, or as several and what lies between, or as it is."""
        counters.increment("DynamoExtractCompiledGraph")
        deferred_steps.finish(trace)
        # a program would keep what a tensor on the host holds now; its nodes are run on every call
        on_host = any(isinstance(a, torch.Tensor) and not isinstance(a, XLATensor) for a in args)
        with without_dispatch_modes():
            graph: GraphProgram | AnyFunction | None = (
                None if on_host else _record(self._model, args, trace)
            )
            if graph is None and isinstance(self._model, fx.GraphModule):
                graph = partition(self._model, args, trace, CompiledGraph)
        if isinstance(graph, GraphProgram) and graph.program is not None:
            graph.program.keep(self._known, key, graph)  # until its program is evicted
            return graph
        if len(self._known) >= caches.MOST:  # arguments that need no program of their own
            self._known.clear()
        graph = self._known[key] = self._model if graph is None else graph
        return graph  # type: ignore[no-any-return]


def extract_compiled_graph(
    xla_model: Callable[..., object], xla_args: Sequence[Operand]
) -> CompiledGraph:
    """A callable that computes ``xla_model(*xla_args)`` with one program, and again for other values.

    ``xla_model`` is an FX graph module. The program is made now, for the shapes of ``xla_args``; other
    shapes (and other numbers among the arguments) make another one. Raises LostOrderError (``lost_order``),
    here or when it is called, where the graph does not say what its writes in place change.
    """
    graph = CompiledGraph(xla_model)
    graph.prepare(xla_args)
    return graph


def partition_fx_graph_for_cpu_fallback(
    xla_model: fx.GraphModule,
    xla_args: Sequence[Operand],
    all_xla_args: Sequence[Operand] = (),
    all_xla_args_tensor_only: Sequence[torch.Tensor] = (),
) -> fx.GraphModule:
    """``xla_model`` cut where operators run on the CPU, the parts between them compiled to programs.

    A graph without such operators becomes one part. The graph is run once, on copies of ``xla_args``;
    buffers that it holds itself are found without ``all_xla_args``, which is accepted.
    """
    args = _with_scalars_on_device(tuple(xla_args))
    trace = _trace_of(args)
    with trace.lock, torch.no_grad():
        parts = partition(xla_model, args, trace, CompiledGraph)
    return one_part(xla_model, CompiledGraph) if parts is None else parts


def _with_scalars_on_device(args: Operands) -> tuple[Operand, ...]:
    """CPU tensors without dimensions (Python floats, to Dynamo) as arguments of the program."""
    if all(type(a) is not torch.Tensor or a.dim() for a in args):
        return args
    device = _trace_of(args).device
    return tuple(a.to(device) if type(a) is torch.Tensor and not a.dim() else a for a in args)


def _trace_of(args: Sequence[Operand]) -> Trace:
    for a in args:
        if isinstance(a, XLATensor):
            return a._s.trace
    return runtime.trace_of(None)


def _key(args: Sequence[Operand], trace: Trace) -> ProgramIdentity:
    """What decides which program runs: shapes, numbers, and how the arguments lie over devices."""
    layouts = trace.backend.argument_layouts(a._s for a in args if isinstance(a, XLATensor))
    return in_memory(trace, tuple(map(_signature, args)), layouts)


def _signature(a: Operand) -> Operand:
    """What of an argument is fixed in a program."""
    if isinstance(a, XLATensor):
        if a._v is None:
            return a._s.meta
        return (a._s.meta, *((v.plan, v.tail) for v in chain(a._v)))
    if isinstance(a, torch.Tensor):
        return (a.device, a.dtype, a.shape)
    return (type(a), repr(a) if isinstance(a, (int, float, complex)) else a)


# -- recording ------------------------------------------------------------------------------------


def _record(model: Callable[..., object], args: Operands, trace: Trace) -> GraphProgram | None:
    """The graph as one program, or None where it cannot be one."""
    _buffers(args, trace, counted=False)  # runs what is pending: it is no part of the graph
    if trace.cur.depth:
        trace.flush(trace)
    rules = trace.rules()
    try:
        try:
            marks: dict[int, bool] = {}
            indivisible.do(trace.obeying(Rules(MSG_UNREADABLE, MSG_UNREADABLE, marks)))
            with eager_mode.mode(False):
                return program_of_step(model, args, trace, marks)
        finally:
            _end_recording(trace, rules)
    except NotOneProgramError:
        return None
    except ValueNeededError as error:
        if error.reason is not MSG_UNREADABLE:  # another one's refusal, inside the graph
            raise
        return None
    finally:
        _end_recording(trace, rules)  # also where an exception came in the line above


def _end_recording(trace: Trace, rules: Rules) -> None:
    """Drop what was recorded for a graph; ``rules`` are those of the step around it."""
    if trace.cur.depth:
        operator_counts.step_ended(trace.epoch, trace.cur)
    indivisible.do(trace.obeying(rules), trace.renewal())


# -- running --------------------------------------------------------------------------------------


def _buffers(args: Sequence[Operand], trace: Trace, counted: bool = True) -> None:
    """Give every argument's storage a buffer: run what is pending, and fill what was never written with zeros.

    As in torch_xla, ``counted`` is the run of an argument of a function that has its program already.
    """
    pending = False
    for a in args:
        if isinstance(a, XLATensor) and a._s.buffer is None:
            pending = True
            if a._s.epoch != trace.epoch:
                trace.add_input(a._s)
    if pending:
        if settings.skip_input_data_check:
            raise RuntimeError(MSG_PENDING)
        if counted:
            counters.increment("DynamoSyncInputExecuteTime")
        trace.flush(trace)
    deferred_steps.finish(trace)


def _run(recorded: GraphProgram, args: Operands, trace: Trace) -> Operand:
    if recorded.written:
        lost_order.check_arguments(args, (number for number, _ in recorded.written))
    _buffers(args, trace)
    program = recorded.program
    results: list[Operand] = []
    if program is not None:
        targets = [args[number]._s for number, _ in recorded.written]
        values = map(results.__getitem__, [position for _, position in recorded.written])
        work = replacing(targets, values)
        if recorded.given_away:
            gone = [args[number]._s for number in recorded.given_away]
            work = itertools.chain(work, buffer_donation.releasing(gone))
        arguments = _arguments(recorded, program, args, trace)
        # listeners must not take the pending step, of which the graph is no part, for the one that runs
        listened = events.listening(events.ProgramExecuted)
        step = trace.copy_at(trace.root, inputs=0) if listened else None
        run_step.launch(trace, program, arguments, results, work, recorded=step)
    shared: dict[int, Storage] = {}
    given = [_give(r, results, shared, args, trace) for r in recorded.results]
    for number, _ in recorded.written:
        if not args[number].is_inference():
            increment_version(args[number])
    container = recorded.container
    return pytree.tree_unflatten(given, recorded.spec) if container is None else container(given)


def _arguments(
    recorded: GraphProgram, program: StepProgram, args: Operands, trace: Trace
) -> list[Buffer]:
    arguments: list[Array] = [
        _captured(a, trace) if isinstance(a, Storage) else trace.backend.device_buffer(a._s)
        for a in recorded.inputs(args)
    ]
    for slot in program.donated:
        if getrefcount(arguments[slot]) > _STORAGE_ONLY:
            arguments[slot] = trace.backend.copy(arguments[slot])
            program.copied_donations += 1
    if recorded.floats is not None:
        arguments.append(recorded.floats)
    if recorded.ints is not None:
        ints = recorded.ints.copy()
        for position in recorded.seeds:
            ints[position] = random_state.next_seed(trace.device.index)
        arguments.append(trace.backend.put_numbers(ints))
    return arguments


def _captured(s: Storage, trace: Trace) -> Operand:
    """The buffer of a tensor that the graph holds itself."""
    trace.compute(s)
    return trace.backend.device_buffer(s)


def _give(
    r: Fresh | Shared | Passed | Constant,
    results: list[Operand],
    shared: dict[int, Storage],
    args: Operands,
    trace: Trace,
) -> Operand:
    """A result for the caller; ``shared`` keeps, by position, the storages that several results show."""
    if isinstance(r, Fresh):
        return trace.from_buffer(results[r.position], r.meta)
    if isinstance(r, Constant):
        return r.value
    if isinstance(r, Shared):
        own = shared.get(r.position)
        if own is None:
            own = shared[r.position] = trace.holding(results[r.position], r.meta)
    else:
        # What an argument holds is a value of its own here: writing to one of them changes just that one.
        source = args[r.argument]._s
        own = trace.holding(source.buffer, source.meta)
    return tensor_on(own, copied_view(r.view))
