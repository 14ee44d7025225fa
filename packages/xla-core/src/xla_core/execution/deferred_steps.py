"""Steps that end while their programs are still being compiled: their runs wait, and recording continues.

``run_step`` defers a step if its program, or that of an earlier step, is not compiled yet.
``launching.launch_queue`` holds the waiting runs and starts them in order. This module does the part of the
recording thread: it decides whether a step may wait, gives tensors their buffers afterwards, and computes what is
still possible after a run has failed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from sys import getrefcount
from typing import Final

import numpy as np

from xla_core.compilation import build_program, compile_threads
from xla_core.compilation.program_table import StepProgram, drop
from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.execution import culprits, poisoned_values
from xla_core.launching import buffer_donation, launch_queue
from xla_core.launching.launch_queue import Awaited, DeferredRun, Result
from xla_core.launching.program_launch import INPUT_ONLY, enqueue, keep_donated
from xla_core.operators.run_rule import LoweringError
from xla_core.recording.storage import Storage, binding, poison
from xla_core.recording.trace import Trace
from xla_core.support import indivisible

LEAST_OPERATIONS: Final = 64
"""A smaller program is compiled before the next step could be recorded, so a second thread gains nothing."""


def may_wait(trace: Trace) -> bool:
    """Whether the pending step, which has no program yet, may wait for one while other steps are recorded."""
    return (
        trace.backend.may_defer
        and trace.cur.depth >= LEAST_OPERATIONS
        and len(trace.backend.replicas) < 2
        and not (trace.eager_flush or trace.body_recorder or is_watched())
        and compile_threads.wanted() > 0
        and not compile_threads.is_closed()
    )


def is_watched() -> bool:
    """Whether a listener sees the buffers of every run, or buffers are given away, so that they must exist."""
    return buffer_donation.any_may_count() or events.listening(events.ProgramExecuted)


def defer(
    trace: Trace, program: StepProgram, alive: list[Storage], adoption: Iterable[object]
) -> None:
    """End the pending step; it runs when its program is compiled and all earlier runs have started."""
    queue = trace.backend.queue
    queue.open(functools.partial(_settle_until, trace))
    run = DeferredRun(queue, trace.detached(), program, [*trace.inputs, *numbers_of(trace)], _start)
    former = {id(trace.touched[p]): slot for slot, p in enumerate(trace.input_storages)}
    index = program.output_index
    values = []
    for s in alive:
        awaited = Awaited(run)
        run.results.append(Result(awaited, s.vid, index[s.vid], former.get(id(s))))
        run.storages.append(weakref.ref(s))
        values.append(awaited)
    bound = binding(alive, values)
    indivisible.do(adoption, queue.adding(run), bound, trace.renewal())
    if events.listening(events.RunRequested):
        events.emit(events.RunRequested(trace=trace, program=program))


def note_adopted(storages: Sequence[Storage], buffers: Sequence[object]) -> None:
    """Register storages that take over awaited values, so that they get the buffers as well."""
    for s, buffer in zip(storages, buffers, strict=True):
        if type(buffer) is Awaited:
            buffer.run.storages.append(weakref.ref(s))


def _start(run: DeferredRun) -> list[Buffer]:
    """Launch a waiting run; called in the queue's thread."""
    trace, program, given = run.trace, run.program, run.arguments
    backend = trace.backend
    safe = not program.donated or backend.has_room(program.memory_needed())
    copied = [slot for slot in program.donated if _is_held(given, slot)]
    arguments = list(map(launch_queue.value_of, given))
    for slot in copied:
        arguments[slot] = backend.copy(arguments[slot])
        program.copied_donations += 1
    if not safe:
        keep_donated(trace, program, arguments, given)
    results: list[Buffer] = []
    enqueue(trace, program, arguments, results, wait=not safe)
    return results


def _is_held(given: Sequence[object], slot: int) -> bool:
    """Whether anything other than the list ``given`` refers to the buffer in this slot."""
    buffer = given[slot]
    if getrefcount(buffer) > INPUT_ONLY + 1:
        return True
    if type(buffer) is Awaited:
        buffer = buffer.held
        return getrefcount(buffer) > INPUT_ONLY + 1
    return False


def catch_up(trace: Trace) -> None:
    """Before the pending step runs: settle the runs that have ended. Raises the error of a failed run."""
    queue = trace.backend.queue
    if len(queue.unsettled) >= launch_queue.MOST_WAITING:
        _settle_until(trace, queue.unsettled[0])
    settle(trace, wait=False)
    if queue.failed:
        poisoned_values.poison_failed(trace)
    queue.tell()


def _settle_until(trace: Trace, run: DeferredRun) -> None:
    with trace.lock:
        while run in trace.backend.queue.unsettled:
            _settle_first(trace)


def settle(trace: Trace, wait: bool = True) -> None:
    """Give tensors the buffers of deferred runs, and keep the errors of failed runs to be raised.

    With ``wait`` (default: True), waits for all runs; otherwise leaves those that have not started.
    """
    with trace.lock:
        unsettled = trace.backend.queue.unsettled
        while unsettled and (wait or unsettled[0].ended.is_set()):
            _settle_first(trace)


def _settle_first(trace: Trace) -> None:
    """Wait for the first run in the queue, and settle it. After an interrupt it is still the first."""
    queue = trace.backend.queue
    run = queue.unsettled[0]
    run.ended.wait()
    if run.error is not None and not run.handled.is_set():
        queue.failed = True
        error = _recover(run)
        if error is not None and queue.untold is None:
            queue.untold = error
        run.handled.set()
    making = run.program.making
    if making is not None and run.error is None:
        run.program.making = None
        making.tell()
    for ref in run.storages:
        s = ref()
        if s is not None:
            _unwrap(s)
    records = [step.record for step in trace.parked.values() if step.record is not None]
    for inputs in (trace.inputs, *(record.inputs for record in records)):
        for slot, buffer in enumerate(inputs):
            if type(buffer) is Awaited and buffer.error is None and buffer.held is not None:
                inputs[slot] = buffer.held
    queue.unsettled.popleft()


def _unwrap(s: Storage) -> None:
    """Give a storage the buffer that it awaits."""
    awaited = s.buffer
    if type(awaited) is not Awaited:
        return
    if awaited.error is None:
        if awaited.held is not None:
            s.relocate(awaited.held)
    elif awaited.held is not None:
        s.replace(awaited.held)
    else:
        poison(s, awaited.error)


def _recover(run: DeferredRun) -> Exception | None:
    """Compute those values of a failed run that can be computed; returns the error to raise, if it is new.

    Values are lost if they depend on an operation that the compiler refuses, or on another failed run. If that
    operation cannot be found, or the compiler has not refused the program, all values are lost.
    """
    assert run.error is not None
    if run.program.has_failed():
        drop(run.program)  # it may have failed before it was kept
    first_error: Exception | None = None
    lost = poisoned_values.depending_on_failed(run)
    outputs = dict.fromkeys(result.vid for result in run.results)
    search = culprits.Search(run.trace)
    error: Exception | None = None if lost else run.error
    results: dict[int, object] = {}
    while True:
        if error is not None:
            named = search.named(error, tuple(vid for vid in outputs if vid not in lost))
            if named is not None and named is not error:
                named.__cause__ = error
            error = named or error
            dependent: set[int] = set()
            if isinstance(error, LoweringError):
                dependent = poisoned_values.depending(run.trace.cur.path(), error)
            new = (dependent & outputs.keys()) - lost.keys() or outputs.keys() - lost.keys()
            lost |= dict.fromkeys(new, error)
            first_error = first_error or error
        rest = tuple(vid for vid in outputs if vid not in lost)
        if not rest:
            break
        try:
            program = build_program.build(run.trace, rest, ())
            arguments = _replaced(run)
            values: list[Buffer] = []
            enqueue(run.trace, program, arguments, values)
            results = {vid: values[program.output_index[vid]] for vid in rest}
            break
        except Exception as another:
            if not poisoned_values.costs_values(another):
                raise
            error = another
    poisoned_values.give_up(run, lost)
    for result in run.results:
        awaited = result.awaited()
        if awaited is not None and result.vid in results:
            awaited.held = results[result.vid]
    return first_error


def _replaced(run: DeferredRun) -> list[Buffer]:
    """The arguments of a run, with zeros for values that were never computed."""
    backend, arguments = run.trace.backend, []
    for slot, argument in enumerate(run.arguments):
        if type(argument) is Awaited and argument.error is not None:
            argument = backend.client.allocate(run.program.inputs[slot], backend.placement)
        arguments.append(launch_queue.value_of(argument))
    return arguments


def finish(trace: Trace) -> None:
    """Wait until all deferred runs have started. Raises the error of a failed run."""
    if launch_queue.any_awaited():
        settle(trace)
        trace.backend.queue.tell()


def held_by(trace: Trace, s: Storage) -> Buffer:
    """The buffer of a materialised storage; waits for it if it is awaited. Raises the error of a failed run."""
    awaited = s.buffer
    if type(awaited) is not Awaited:
        return awaited
    _settle_until(trace, awaited.run)
    if awaited.error is not None:
        trace.backend.queue.tell()
    return launch_queue.value_of(s.buffer)


def numbers_of(trace: Trace) -> list[Buffer]:
    """The lifted numbers of the pending step, as the last arguments of its program."""
    put = trace.backend.put_numbers
    arguments = []
    if trace.floats:
        arguments.append(put(np.array(trace.floats, np.float64)))
    if trace.ints:
        arguments.append(put(np.array(trace.ints, np.int64)))
    return arguments
