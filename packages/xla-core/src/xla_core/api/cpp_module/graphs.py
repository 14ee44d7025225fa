"""Names of torch_xla's C++ module ``_XLAC`` about recorded graphs: their hashes, inputs and compiled programs.

Compiler bridges and serving code use them: ``_get_graph_hash`` identifies a graph,
``_get_tensors_xla_device_data_node`` returns its inputs, ``_xla_warm_up_cache`` compiles it, and
``_run_cached_graph`` runs it on other inputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.api import compile_decorator, xla_model
from xla_core.api.stablehlo_text import stablehlo_bytecode, stablehlo_text
from xla_core.builder.hlo import from_module
from xla_core.compilation.program_identity import of_results
from xla_core.compilation.program_table import StepProgram
from xla_core.contract.device_protocol import Buffer
from xla_core.dispatch.transfers import materialise
from xla_core.execution import deferred_steps, run_step, runtime
from xla_core.execution.pending_graph import graph_of, read_inputs
from xla_core.jax_bridge import hlo_primitives
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.lowering.replay import needed_entries
from xla_core.operators.plan import SEED
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording import random_state, step_key
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.storage import PLACEHOLDER
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import caches, counters
from xla_core.torch_bridge.operands import Operand

MSG_UNKNOWN_GRAPH: Final = (
    "no graph with the hash {hash} was compiled by _xla_warm_up_cache in this process: call it with "
    "the tensors whose _get_graph_hash it is, before they are computed"
)
MSG_INPUTS: Final = "the graph {hash} has {wanted} inputs, got {got}"
MSG_INPUT: Final = "input {number} of the graph {hash} is {wanted}, got {got}"
MSG_DELETED: Final = "Data handle is deleted: this tensor's value was donated or never computed"
MSG_SESSION: Final = "no session is open; call _dynamic_shape_detector_start_session(name) first"


# -- hashes ----------------------------------------------------------------------------------------


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """A hash of 16 bytes of the graph that computes ``tensors``, the same for equal graphs in all processes.

    Graphs that differ only in lifted numbers, such as learning rates, are equal.
    """
    with graph_of(tensors) as (_, entries, outputs):
        return _hash(entries, outputs)


def _hash(entries: Sequence[Entry], outputs: Sequence[int]) -> bytes:
    numbers: dict[int, int] = {}

    def word(operand: Operand) -> str:
        if isinstance(operand, Ref):
            if operand.vid not in numbers:
                numbers[operand.vid] = len(numbers)
            return f"%{numbers[operand.vid]}"
        if isinstance(operand, Lift):
            return f"number {operand.example}"
        return repr(operand)

    lines = []
    read = set(outputs)
    needed = needed_entries(entries, outputs)
    for entry in needed:
        read.update(ref.vid for ref in entry.references())
    for entry in needed:
        name, args, kwargs = "input", (), {}
        if isinstance(entry, Operation):
            name, args, kwargs = entry.plan.name, entry.args, entry.kwargs
        elif entry.first not in read:
            continue
        operands = step_key.map_operands(word, [args, *sorted(kwargs.items())])
        for vid in range(entry.first, entry.end):
            numbers.setdefault(vid, len(numbers))
        lines.append(f"%{numbers[entry.first]} = {name} {operands} -> {entry.metas}")
    lines.append(f"outputs {[numbers[vid] for vid in outputs]}")
    return hashlib.sha256("\n".join(lines).encode()).digest()[:16]


# -- inputs ----------------------------------------------------------------------------------------


def _get_tensors_xla_device_data_node(
    output_tensors: Sequence[torch.Tensor], uncloned_tensors: Sequence[torch.Tensor] = ()
) -> tuple[list[int], list[torch.Tensor]]:
    """The inputs of the graph that computes ``output_tensors``: their tensor ids, and tensors with their values.

    The ids are those of ``_xla_get_tensor_id``; the order is that in which ``_run_cached_graph`` takes the inputs.
    An input that is one of ``uncloned_tensors`` is returned as that tensor, any other as a new tensor with the same
    value. Nothing runs.
    """
    own = {id(t._s): t for t in uncloned_tensors if isinstance(t, XLATensor)}
    ids, tensors = [], []
    with graph_of(output_tensors) as (trace, entries, outputs):
        for slot in read_inputs(trace, entries, outputs)[0]:
            storage = trace.touched[trace.input_storages[slot]]
            ids.append(id(storage))
            buffer = trace.inputs[slot]
            same = own.get(id(storage))
            reused = same is not None and same._s.buffer is buffer and same._v is None
            tensors.append(same if reused else trace.from_buffer(buffer, storage.meta))
    return ids, tensors


def _get_tensors_handle(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the id of its buffer in device memory; tensors that share a buffer have the same.

    Pending operations run first. Raises RuntimeError for a tensor whose buffer was donated.
    """
    handles = []
    for tensor in tensors:
        xla = _on_xla(tensor)
        trace = xla._s.trace
        with trace.lock:
            buffer = materialise(trace, xla._s)
            if buffer is None:  # it was never written to
                buffer = trace.backend.allocate(xla._s.meta)
                xla._s.bind(buffer)
        if _is_deleted(buffer):
            raise RuntimeError(MSG_DELETED)
        handles.append(id(buffer))
    return handles


def _is_deleted(buffer: Buffer) -> bool:
    is_deleted = getattr(buffer, "is_deleted", None)
    return is_deleted is not None and bool(is_deleted())


def _on_xla(tensor: torch.Tensor) -> XLATensor:
    if not isinstance(tensor, XLATensor):
        raise RuntimeError(f"Input tensor is not an XLA tensor: {torch.Tensor.type(tensor)}")
    return tensor


def _check_device_tensor_need_materialization(device: str = "") -> list[bool]:
    """For each live tensor that the current step of a device reads or computes, whether it is pending."""
    trace = runtime.trace_of(device or None)
    with trace.lock:
        pending = {id(s) for s in run_step.wanted(trace)[0]}
        return [id(s) in pending for s in trace.touched if id(s) in pending or s.buffer is not None]


def _unique_id_for_ir_and_data(tensor: torch.Tensor) -> str:
    """A text that identifies a tensor's value: tensors have the same one only if they show the same value."""
    xla = _on_xla(tensor)
    storage = xla._s
    if storage.trace.is_pending(storage):
        value = f"ir:{storage.trace.device}:{storage.epoch}:{storage.vid}"
    elif storage.buffer is None or storage.buffer is PLACEHOLDER:  # of many storages
        value = f"storage:{id(storage)}"
    else:
        value = f"data:{id(storage.buffer)}"
    return value if xla._v is None else f"{value}:view:{id(xla._v)}"


# -- programs --------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Cached:
    """A compiled graph: its program, and how to make the program's arguments.

    ``inputs`` are the shapes and dtypes of the step's inputs, ``given`` the positions of those that a caller gives.
    ``results`` has the value number, shape and dtype of each result. ``floats`` and ``ints`` are the lifted
    numbers, and ``seeds`` the positions of random seeds among the ints.
    """

    trace: Trace
    program: StepProgram
    inputs: list[TensorMeta]
    given: list[int]
    results: list[tuple[int, TensorMeta]]
    floats: list[float]
    ints: list[int]
    seeds: list[int]

    def arguments(self, tensors: Sequence[XLATensor]) -> list[Buffer]:
        """The program's arguments for these inputs; inputs that the results do not depend on are zeros."""
        backend = self.trace.backend
        buffers: list[JaxObject] = [None] * len(self.inputs)
        for position, tensor in zip(self.given, tensors, strict=True):
            buffer = materialise(tensor._s.trace, tensor._s)
            unwritten = buffer is None
            buffers[position] = (
                backend.allocate(tensor._s.meta) if unwritten else backend.device_buffer(tensor._s)
            )
        for slot, meta in enumerate(self.inputs):
            if buffers[slot] is None:
                buffers[slot] = backend.allocate(meta)
        for slot in self.program.donated:
            buffers[slot] = backend.copy(buffers[slot])
        for position in self.seeds:
            self.ints[position] = random_state.next_seed(int(self.trace.device.index))
        for values, dtype in ((self.floats, torch.float64), (self.ints, torch.int64)):
            if values:
                buffers.append(backend.put_numbers(torch.tensor(values, dtype=dtype).numpy()))
        return buffers


_cached: caches.Bounded[bytes, _Cached] = caches.Bounded("graphs of _xla_warm_up_cache", 1024)


def _xla_warm_up_cache(tensors: Sequence[torch.Tensor], devices: Sequence[str] = ()) -> None:
    """Compile the pending operations on the devices of ``tensors``, without running them.

    The next sync uses the program, and ``_run_cached_graph`` runs the graph of ``tensors`` on other inputs.
    """
    del devices
    given = [_on_xla(t) for t in tensors]
    for trace in {id(t._s.trace): t._s.trace for t in given}.values():
        run_step.warm_up(trace)
    if given:
        _remember(given)


def _remember(tensors: Sequence[XLATensor]) -> None:
    """Keep the program of ``tensors`` under the hash of their graph."""
    with graph_of(tensors) as (trace, entries, outputs):
        if not operations_of(needed_entries(entries, outputs)):
            return  # all of them have values
        distinct = tuple(dict.fromkeys(outputs))
        program = run_step.find_or_build(trace, of_results(trace, distinct, ()))
        slots = read_inputs(trace, entries, outputs)[0]
        graph = _Cached(
            trace=trace,
            program=program,
            inputs=[trace.touched[p].meta for p in trace.input_storages],
            given=slots,
            results=[
                (vid, meta) for vid, meta in zip(outputs, _metas(entries, outputs), strict=True)
            ],
            floats=list(trace.floats),
            ints=list(trace.ints),
            seeds=[lift.position for e in operations_of(entries) for lift in _seeds(e)],
        )
        _cached.keep(_hash(entries, outputs), graph)


def _metas(entries: Sequence[Entry], outputs: Sequence[int]) -> list[TensorMeta]:
    known = {e.first + i: m for e in entries for i, m in enumerate(e.metas) if m is not None}
    return [known[vid] for vid in outputs]


def _seeds(entry: Operation) -> list[Lift]:
    seed = entry.kwargs.get(SEED)
    return [seed] if isinstance(seed, Lift) else []


def _run_cached_graph(hash: bytes, graph_inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the graph with this hash on other inputs, and return its results as new tensors.

    ``graph_inputs`` are in the order of ``_get_tensors_xla_device_data_node``. Lifted numbers have the values of
    when the graph was compiled; random numbers are new. Raises RuntimeError for an unknown hash, another number of
    inputs, or an input of another shape or dtype.
    """
    known = _cached.get(bytes(hash))
    if known is None:
        raise RuntimeError(MSG_UNKNOWN_GRAPH.format(hash=bytes(hash).hex()))
    shown = bytes(hash).hex()
    if len(graph_inputs) != len(known.given):
        wanted, got = len(known.given), len(graph_inputs)
        raise RuntimeError(MSG_INPUTS.format(hash=shown, wanted=wanted, got=got))
    tensors = []
    for number, tensor in enumerate(graph_inputs):
        xla = _on_xla(tensor)
        whole = xla if xla._v is None else xla.detach().clone()
        assert isinstance(whole, XLATensor)
        wanted_meta = known.inputs[known.given[number]]
        if whole._s.meta is not wanted_meta:
            text = MSG_INPUT.format(
                number=number, hash=shown, wanted=wanted_meta, got=whole._s.meta
            )
            raise RuntimeError(text)
        tensors.append(whole)
    trace = known.trace
    with trace.lock:
        deferred_steps.finish(trace)
        arguments = known.arguments(tensors)
        counters.sample("RunCachedGraphInputData", len(arguments), counters.render_number)
        results = known.program.executable.execute(arguments)
        counters.sample("RunCachedGraphOutputData", len(results), counters.render_number)
        known.program.count_run()
        trace.backend.launched(results)
        index = known.program.output_index
        return [trace.from_buffer(results[index[vid]], meta) for vid, meta in known.results]


def _clear_pending_irs(device: str = "") -> None:
    """Drop the pending operations of a device; tensors that they would have computed become placeholders."""
    trace = runtime.trace_of(device or None)
    with trace.lock:
        alive = run_step.wanted(trace)[0]
        trace.reset()
        for storage in alive:
            storage.replace(PLACEHOLDER)
        if alive:
            trace.expect_placeholders()


def _run_stablehlo(bytecode: bytes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Record a StableHLO module (bytecode) as one operation of the step on ``tensors``, and return its results."""
    return from_module("stablehlo", bytecode).run("xla::run_stablehlo", tensors)


def _get_stablehlo(
    tensors: Sequence[torch.Tensor],
    device: str = "",
    devices: Sequence[str] = (),
    emit_bytecode: bool = False,
) -> bytes:
    """The graph that computes ``tensors`` (all pending operations if empty), as StableHLO text or bytecode."""
    del device, devices
    if emit_bytecode:
        return stablehlo_bytecode(tensors or None)
    return stablehlo_text(tensors or None).encode()


def _get_xla_tensors_hlo_proto(tensors: Sequence[torch.Tensor]) -> bytes:
    """The graph that computes ``tensors``, as a serialized HloModuleProto."""
    return hlo_primitives.hlo_proto(stablehlo_bytecode(tensors or None))


def _xla_sync_live_tensors(
    device: str = "", devices: Sequence[str] = (), wait: bool = True
) -> None:
    """Run the pending operations of one device (default: the current one), without the step closures."""
    del devices
    runtime.sync(runtime.trace_of(device or None).device, wait=wait)


# -- counting the graphs of a session --------------------------------------------------------------


class _Detector:
    limit = 1
    open: str | None = None
    sessions: dict[str, list[Entry]] = {}


def _dynamic_shape_detector_set_max_different_graphs(max_different_graphs: int) -> None:
    """Set how many different graphs a session may have (at first 1). Raises ValueError for less than 1."""
    if max_different_graphs < 1:
        raise ValueError(compile_decorator.MSG_LIMIT.format(got=max_different_graphs))
    _Detector.limit = int(max_different_graphs)


def _dynamic_shape_detector_get_max_different_graphs() -> int:
    """How many different graphs a session may have."""
    return _Detector.limit


def _dynamic_shape_detector_start_session(name: str) -> None:
    """Run the pending operations, and begin the session ``name``: what is recorded next belongs to it."""
    runtime.sync()
    _Detector.open = name
    _Detector.sessions.setdefault(name, [])


def _dynamic_shape_detector_end_session() -> None:
    """End the session, and remember the graph recorded since it began; nothing runs.

    Raises RuntimeError, naming the first operation that differs, if that is one graph too many, and if no session
    is open.
    """
    name, _Detector.open = _Detector.open, None
    if name is None:
        raise RuntimeError(MSG_SESSION)
    trace = runtime.trace_of(None)
    with trace.lock:
        compile_decorator.check_graphs(trace, _Detector.sessions[name], _Detector.limit)


def _dynamic_shape_detector_remove_session(name: str) -> None:
    """Forget the graphs of a session. Raises KeyError for an unknown session."""
    del _Detector.sessions[name]


def _xla_get_tensor_view_alias_id(tensor: torch.Tensor) -> int:
    """A number that is the same for all views of one tensor, and different for other live tensors."""
    return id(_on_xla(tensor)._s)


def _init_xla_lazy_backend() -> None:
    """Start the device client, unless it is running."""
    xla_model.devices()


__all__ = [
    "_check_device_tensor_need_materialization", "_clear_pending_irs",
    "_dynamic_shape_detector_end_session", "_dynamic_shape_detector_get_max_different_graphs",
    "_dynamic_shape_detector_remove_session", "_dynamic_shape_detector_set_max_different_graphs",
    "_dynamic_shape_detector_start_session", "_get_graph_hash", "_get_stablehlo",
    "_get_tensors_handle", "_get_tensors_xla_device_data_node", "_get_xla_tensors_hlo_proto",
    "_init_xla_lazy_backend", "_run_cached_graph", "_run_stablehlo", "_unique_id_for_ir_and_data",
    "_xla_get_tensor_view_alias_id", "_xla_sync_live_tensors", "_xla_warm_up_cache",
]  # fmt: skip
