"""Observes one call of a captured function, which runs as an ordinary step.

An ``Observer`` runs the pending operations, records the step in a block, and notes where each input of its program
comes from, which tensors get its results, and which of its device's random seeds it drew. ``matching`` compares two
observations.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from sys import getrefcount
from typing import Final

import numpy as np
from torch.utils import _pytree as pytree

from xla_core.capture import errors
from xla_core.capture.errors import CaptureError, refuse
from xla_core.capture.optimizer_steps import OptimizerSteps, Window
from xla_core.compilation.program_table import StepProgram
from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.contract.foreign_values import ForeignObject
from xla_core.execution import deferred_steps, eager_mode, run_step, runtime, step_closures
from xla_core.execution.device_backend import DeviceBackend
from xla_core.launching import buffer_donation
from xla_core.operators.error_messages import Refusal, ValueNeededError
from xla_core.operators.extensions import extensions
from xla_core.operators.plan import SEED
from xla_core.recording import random_state, source_location
from xla_core.recording.entry import Entry, operations_of
from xla_core.recording.step_key import Lift
from xla_core.recording.storage import Storage
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Replacements, XLATensor
from xla_core.support import indivisible
from xla_core.torch_bridge.operands import Operand, TorchObject

Line = tuple[str, int] | None

# A step that advances the state by more seeds must have set it.
_MOST_DRAWN = 1 << 20
# Older objects than these have survived a collection of the middle generation.
_YOUNG: Final = 1
_NOTED_ONLY: Final = 3
"""References to a buffer that only an observer holds: its note, the loop variable, getrefcount's argument."""

NEW: Final = "new"
CLEARED: Final = "cleared"


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An input of the program, and its storage.

    ``uploaded``: it came from the host inside the step, at ``line``, and ``buffer`` is its value.
    """

    storage: Storage
    buffer: Buffer | None
    uploaded: bool
    line: Line


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A tensor's value after the step: the value with the number ``vid``, or that of the input in ``slot``."""

    vid: int | None = None
    slot: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter that has a gradient before the call, ``was``, or after it, ``grad``; None where it has none.

    ``layout`` is how the former lies on several devices; None on one device.
    """

    parameter: Operand
    grad: Operand
    was: Operand
    layout: object = None

    @property
    def change(self) -> str:
        """What the call does to it: ``NEW`` is another tensor, ``CLEARED`` none; empty if it is the same object."""
        if self.grad is self.was:
            return ""
        return CLEARED if self.grad is None else NEW


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """The ``positions`` of seeds among a step's lifted integers, and the ``places`` of these seeds in the sequence.

    Places are counted from the state before the step, beginning with 1; ``count`` is the number of seeds by which
    the step advances the state. ``known`` is False if a seed is not in the sequence, because the step set the state
    or drew from another generator.
    """

    positions: tuple[int, ...]
    places: tuple[int, ...]
    count: int
    known: bool


@dataclasses.dataclass(slots=True)
class Observation:
    """The record of one call.

    ``last`` is the step's last entry, ``program`` the program that computed it, ``inputs`` its inputs. ``values``
    has the storages that the step gave a value and that were alive at its end. ``arguments`` are the arguments'
    storages, ``leaves`` and ``spec`` the result. ``floats`` and ``ints`` are the lifted numbers, ``drawn`` the
    random seeds, ``windows`` and ``events`` the steps of optimizers and schedulers. ``flagged`` has, by id,
    the tensors whose ``requires_grad`` the call has set, with what it was before. ``modes`` has, if the code may
    switch them, modules with their ``training`` before and after the call. ``draws`` says whether random generators
    of the host, or iterators, that the step may use have moved during the call.
    """

    last: Entry
    program: StepProgram
    inputs: list[Input]
    values: list[tuple[Storage, Value]]
    gradients: list[Gradient]
    arguments: list[Storage]
    leaves: list[Operand]
    spec: TorchObject
    floats: list[float]
    ints: list[int]
    drawn: Drawn
    windows: list[Window]
    events: list[tuple[str, ForeignObject]]
    flagged: Mapping[int, bool]
    modes: Sequence[tuple[ForeignObject, bool, bool]] = ()
    draws: bool = False

    def present(self) -> dict[int, Operand]:
        """The gradients from before the call, by ids of the parameters that had one."""
        return {id(g.parameter): g.was for g in self.gradients if g.was is not None}


@contextmanager
def refusing_reads(trace: Trace) -> Iterator[None]:
    """A block in which values of the trace's device cannot be read, and nothing runs there."""
    former = trace.rules()
    reason = Refusal(errors.MSG_READ)
    trace.forbid(reason)
    trace.refuse_reads(reason)
    try:
        yield
    except ValueNeededError as error:
        if error.reason is not reason:
            raise
        raise CaptureError(errors.MSG_READ, _line_of(error)) from error
    finally:
        indivisible.do(trace.obeying(former))
    if reason.given:  # the user's code has caught the error
        raise CaptureError(errors.MSG_READ)


def _line_of(error: BaseException) -> Line:
    """The innermost line of the user's program in an error's traceback."""
    line = None
    step = error.__traceback__
    while step is not None:
        if source_location.is_users(step.tb_frame):
            line = step.tb_frame.f_code.co_filename, step.tb_lineno
        step = step.tb_next
    return line


class Observer:
    """Observes one step: record it in a block ``recording()``, then call ``end``.

    ``parameters`` are those whose gradients may change in it.
    """

    def __init__(
        self,
        trace: Trace,
        name: str,
        arguments: Sequence[XLATensor],
        parameters: Sequence[Operand] = (),
    ) -> None:
        self.trace = trace
        self.name = name
        self._arguments = [t._s for t in arguments]
        self._parameters = parameters
        self._former: list[Gradient] = []
        self._made: dict[int, tuple[object, Line, weakref.ref[Storage]]] = {}
        self._flagged: dict[int, bool] = {}
        self._optimizers = OptimizerSteps(trace)
        self._before = 0
        self._ran: tuple[str, int] | None = None

    @contextmanager
    def recording(self, schedulers: Sequence[object] = ()) -> Iterator[None]:
        """The block that records the step; in it nothing runs, and no value can be read."""
        trace = self.trace
        if buffer_donation.aliasing():
            raise refuse(errors.MSG_DONATION, name=self.name)
        with trace.lock:
            trace.flush(trace)
            deferred_steps.finish(trace)
            self._before = random_state.get_state(trace.device.index)
            self._former = [
                Gradient(p, None, p.grad, self._layout(p.grad)) for p in self._parameters
            ]
        closures = step_closures.waiting(trace.device)
        with ExitStack() as stack:
            stack.enter_context(eager_mode.mode(False))
            stack.enter_context(refusing_reads(trace))
            stack.enter_context(self._optimizers.watching(schedulers))
            stack.callback(setattr, Replacements, "flagged", Replacements.flagged)
            Replacements.flagged = self._flagged
            stack.callback(trace.tell_of_storages, None)
            trace.tell_of_storages(self._note)
            stack.callback(events.subscribe(events.ProgramExecuted, self._listen))
            yield
        if self._ran is not None:
            raise refuse(errors.MSG_RUNS, self._ran, name=self.name)
        if step_closures.waiting(trace.device) != closures:
            raise refuse(errors.MSG_CLOSURE, name=self.name)

    def _listen(self, event: events.ProgramExecuted) -> None:
        if event.program.backend is self.trace.backend:
            self._ran = source_location.user_line()

    def _note(self, s: Storage) -> None:
        self._made[id(s)] = s.buffer, source_location.recording_line(), weakref.ref(s)

    def _layout(self, grad: Operand) -> object:
        backend = self.trace.backend
        if type(backend) is DeviceBackend or not isinstance(grad, XLATensor):
            return None
        return backend.argument_layouts([grad._s])

    def _gradients(self) -> list[Gradient]:
        """The gradients from before the call, and the present ones of the same parameters."""
        return [dataclasses.replace(one, grad=one.parameter.grad) for one in self._former]

    def end(self, result: Operand) -> Observation:
        """Run the step, and return its record."""
        trace = self.trace
        leaves, spec = pytree.tree_flatten(result)
        gradients = [g for g in self._gradients() if g.grad is not None or g.was is not None]
        self._collect_garbage((*leaves, *(t for g in gradients for t in (g.grad, g.was))))
        with trace.lock:
            self._check_devices()
            alive, passed, _ = run_step.wanted(trace)
            last, floats, ints = trace.cur, list(trace.floats), list(trace.ints)
            inputs = self._inputs()
            values = [(s, Value(vid=s.vid)) for s in alive]
            values += [(s, Value(slot=slot)) for s, slot in passed]
            kept = extensions().hook.xla_core_kept_in_step(trace=trace)
            ignored = {id(t._s) for t in kept if t is not None}
            values = [(s, value) for s, value in values if id(s) not in ignored]
            del kept
            trace.flush(trace, shared=False)
            deferred_steps.finish(trace)
            program: ForeignObject = trace.backend.last_program  # a StepProgram
        if not alive:
            raise refuse(errors.MSG_NO_PROGRAM, name=self.name, device=trace.device)
        self._check_host_writes(inputs)
        state = random_state.get_state(trace.device.index)
        drawn = _drawn_in(last.path(), ints, self._before, state)
        return Observation(
            last, program, inputs, values, gradients, self._arguments, leaves, spec, floats, ints,
            drawn, self._optimizers.windows, self._optimizers.events, self._flagged,
        )  # fmt: skip

    def _collect_garbage(self, wanted: Sequence[Operand]) -> None:
        """Delete tensors that only reference cycles keep alive, not ``wanted`` ones: they would count as results.

        Most are young. A collection of all objects takes 0.2 s, as torch and jax make a million.
        """
        gc.collect(_YOUNG)
        if self._keeps_more_than(wanted):
            gc.collect()

    def _keeps_more_than(self, tensors: Iterable[Operand]) -> bool:
        """Whether a tensor that the step has made is alive and not among ``tensors``."""
        trace = self.trace
        known = {id(t._s) for t in tensors if isinstance(t, XLATensor)}
        living = (storage() for _, _, storage in self._made.values())
        uploaded = {id(s) for s in living if s is not None}
        with trace.lock:
            touched = set(map(id, trace.touched))  # the trace keeps these alive, whatever else does
            inputs = {id(trace.touched[position]) for position in trace.input_storages}
            alive, passed, _ = run_step.wanted(trace)
        results = {id(s) for s in (*alive, *(s for s, _ in passed))}
        return bool(results - known - (inputs - uploaded) or uploaded - touched)

    def _check_devices(self) -> None:
        for other in runtime.traces():
            if other is not self.trace and other.cur.depth:
                raise refuse(errors.MSG_DEVICES, name=self.name, other=other.device)

    def _inputs(self) -> list[Input]:
        trace = self.trace
        inputs = []
        for position, buffer in zip(trace.input_storages, trace.inputs, strict=True):
            s = trace.touched[position]
            creation = self._made.get(id(s))
            line = creation[1] if creation is not None else None
            value = None if creation is None else buffer
            inputs.append(Input(s, value, creation is not None, line))
        return inputs

    def _check_host_writes(self, inputs: Sequence[Input]) -> None:
        """Raise CaptureError for values from the host that are not inputs, as they were written to a tensor.

        What nothing refers to any more had no effect. Over a mesh, a tensor may have the value in another buffer.
        """
        known = {id(one.buffer) for one in inputs if one.uploaded}
        buffers_are_shared = type(self.trace.backend) is DeviceBackend
        for buffer, line, storage in self._made.values():
            if buffer is None or id(buffer) in known:
                continue
            is_gone = storage() is None and getrefcount(buffer) <= _NOTED_ONLY
            if not (is_gone and buffers_are_shared):
                raise refuse(errors.MSG_HOST_WRITE, line, name=self.name)


def _drawn_in(entries: Sequence[Entry], ints: Sequence[int], before: int, after: int) -> Drawn:
    """The seeds of a step with these entries and lifted integers, and these random states before and after."""
    positions = []
    for entry in operations_of(entries):
        seed = entry.kwargs.get(SEED) if entry.plan.random else None
        if isinstance(seed, Lift):
            positions.append(seed.position)
    count = random_state.distance(before, after)
    if count > _MOST_DRAWN:
        return Drawn(tuple(positions), (), 0, False)
    numbers = random_state.seeds_after(before, np.arange(1, count + 1, dtype=np.uint64))
    places = {int(seed): place for place, seed in enumerate(numbers, 1)}
    drawn = [places.get(ints[position], 0) for position in positions]
    return Drawn(tuple(positions), tuple(drawn), count, all(drawn))
