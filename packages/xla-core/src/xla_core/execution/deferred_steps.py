"""Steps that end while their programs are still being compiled: their runs wait, and recording goes on.

``run_step`` hands a step over where its program, or that of a step before it, is not there yet. What waits, and
in which order it starts, is in ``launching.launch_queue``; here is what the recording thread does about it:
deciding, giving tensors their buffers afterwards, and computing what can be where a run has failed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from sys import getrefcount
from typing import Any, Final

import numpy as np

from xla_core.compilation import build_program, compile_threads
from xla_core.compilation.program_table import StepProgram, drop
from xla_core.contract import events
from xla_core.execution import culprits, poisoned_values
from xla_core.launching import buffer_donation, launch_queue
from xla_core.launching.launch_queue import Awaited, DeferredRun, Result
from xla_core.launching.program_launch import INPUT_ONLY, enqueue, keep_donated
from xla_core.operators.run_rule import LoweringError
from xla_core.recording.storage import Storage, binding, poison
from xla_core.recording.trace import Trace
from xla_core.support import indivisible

LEAST_OPERATIONS: Final = 64
"""A program of fewer is compiled before the next step could be recorded: it is not worth a second thread."""


def may_wait(trace: Trace) -> bool:
    """Whether the pending step, whose program is not there, may wait for it while others are recorded."""
    return (
        trace.backend.may_defer
        and trace.cur.depth >= LEAST_OPERATIONS
        and len(trace.backend.replicas) < 2
        and not (trace.eager_flush or trace.aside or is_watched())
        and compile_threads.wanted() > 0
        and not compile_threads.is_closed()
    )


def is_watched() -> bool:
    """Whether somebody looks at the buffers of every run, or gives buffers away: then they must be there."""
    return buffer_donation.any_may_count() or events.listening(events.ProgramExecuted)


def defer(
    trace: Trace, program: StepProgram, alive: list[Storage], adoption: Iterable[object]
) -> None:
    """End the pending step: it runs when its program is there and those before it have started."""
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
    """Let storages that take over awaited values get their buffers with the others."""
    for s, buffer in zip(storages, buffers, strict=True):
        if type(buffer) is Awaited:
            buffer.run.storages.append(weakref.ref(s))


def _start(run: DeferredRun) -> list[Any]:
    """Launch a run that has waited; called on the queue's thread."""
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
    results: list[Any] = []
    enqueue(trace, program, arguments, results, wait=not safe)
    return results


def _is_held(given: list[object], slot: int) -> bool:
    """Whether somebody else than the list ``given`` wants the value there."""
    buffer = given[slot]
    if getrefcount(buffer) > INPUT_ONLY + 1:
        return True
    if type(buffer) is Awaited:
        buffer = buffer.held
        return getrefcount(buffer) > INPUT_ONLY + 1
    return False


def catch_up(trace: Trace) -> None:
    """Before the pending step runs: settle what has ended. Raises what a run has failed with."""
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
    """Give tensors the buffers of runs that have waited for their programs; the others' errors are to be told.

    With ``wait`` (default) all runs are waited for, else those are left that have not started.
    """
    with trace.lock:
        unsettled = trace.backend.queue.unsettled
        while unsettled and (wait or unsettled[0].ended.is_set()):
            _settle_first(trace)


def _settle_first(trace: Trace) -> None:
    """Wait for the run that is first in the queue, and settle it. An interrupt leaves it as the first."""
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
    """Let a storage hold what it awaited."""
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
    """Compute what can be computed of a run that has failed; the error to tell, None if it was told before.

    What is lost depends on an operation that the compiler refuses, or on a run that has failed. Where no search
    names the operation, and where it was no compiler that refused the program, all is lost.
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
            gone: set[int] = set()
            if isinstance(error, LoweringError):
                gone = poisoned_values.depending(run.trace.cur.path(), error)
            new = (gone & outputs.keys()) - lost.keys() or outputs.keys() - lost.keys()
            lost |= dict.fromkeys(new, error)
            first_error = first_error or error
        rest = tuple(vid for vid in outputs if vid not in lost)
        if not rest:
            break
        try:
            program = build_program.build(run.trace, rest, ())
            arguments = _replaced(run)
            values: list[Any] = []
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


def _replaced(run: DeferredRun) -> list[Any]:
    """The arguments of a run, with zeros for values that were never computed."""
    backend, arguments = run.trace.backend, []
    for slot, argument in enumerate(run.arguments):
        if type(argument) is Awaited and argument.error is not None:
            argument = backend.client.allocate(run.program.inputs[slot], backend.placement)
        arguments.append(launch_queue.value_of(argument))
    return arguments


def finish(trace: Trace) -> None:
    """Wait until every run has started that waits for its program. Raises what one of them has failed with."""
    if launch_queue.any_awaited():
        settle(trace)
        trace.backend.queue.tell()


def held_by(trace: Trace, s: Storage) -> Any:
    """The buffer of a storage that has one, which is waited for. Raises what its run has failed with."""
    awaited = s.buffer
    if type(awaited) is not Awaited:
        return awaited
    _settle_until(trace, awaited.run)
    if awaited.error is not None:
        trace.backend.queue.tell()
    return launch_queue.value_of(s.buffer)


def numbers_of(trace: Trace) -> list[Any]:
    """The lifted numbers of the pending step, as the last arguments of its program."""
    put = trace.backend.put_numbers
    arguments = []
    if trace.floats:
        arguments.append(put(np.array(trace.floats, np.float64)))
    if trace.ints:
        arguments.append(put(np.array(trace.ints, np.int64)))
    return arguments
