"""One run of a program: enqueuing it, counting it, and what is said where that fails."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Final

from xla_core.compilation.program_table import StepProgram, execution
from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.launching.launch_queue import value_of
from xla_core.lowering import program_failures
from xla_core.recording.trace import Trace
from xla_core.support import counters, flight_ring, indivisible
from xla_core.varying.padded_buffer import any_padded, arguments_for, whole_buffer

INPUT_ONLY: Final = 2
"""References to a buffer that nobody but the step's inputs hold: the list, the argument."""


def launch(
    trace: Trace,
    program: StepProgram,
    arguments: list[Buffer],
    results: list[Buffer],
    work: Iterable[object],
    wait: bool = False,
    recorded: Trace | None = None,
    watched: int | None = None,
) -> None:
    """Enqueue one run of a program on ``arguments``, and count it; with ``wait`` it has ended when this returns.

    ``recorded`` is what listeners are told that recorded it; default: a copy of ``trace``. ``watched`` is the
    number of a result that is sure to live on, to wait for; default: all are kept in mind.

    The list ``results`` gets its results, and then ``work`` is done, which gives them to their
    tensors: no exception comes between, since what was donated exists in ``results`` only. Raises what the
    launch raises, torch.OutOfMemoryError where memory does not suffice.
    """
    if recorded is None:
        recorded = copy.copy(trace) if events.listening(events.ProgramExecuted) else trace
    elapsed = enqueue(trace, program, arguments, results, work, wait, watched)
    if events.listening(events.RunRequested):
        events.emit(events.RunRequested(trace=trace, program=program))
    if events.listening(events.ProgramExecuted):
        executed = events.ProgramExecuted(
            trace=recorded, program=program, results=results, nanoseconds=elapsed
        )
        events.emit(executed)


def enqueue(
    trace: Trace,
    program: StepProgram,
    arguments: list[Buffer],
    results: list[Buffer],
    work: Iterable[object] = (),
    wait: bool = False,
    watched: int | None = None,
) -> int:
    """What ``launch`` does, without a word to listeners; the nanoseconds that it took."""
    record = flight_ring.begin(flight_ring.LAUNCH, program.name)
    given = arguments
    if any_padded():
        given = arguments_for(program.executable, arguments, program.donated)
    run = execution(program.executable, given, results)
    try:
        if wait:  # nothing is donated, and what fails later is known before it is bound
            indivisible.do(run)
            ended = results[:]
            results.clear()
            trace.backend.client.wait(list(map(whole_buffer, ended)))
            run = map(results.extend, (ended,))
        indivisible.do(run, work)
    except Exception as error:
        flight_ring.waited(record)
        if results:  # an exception of somebody else's, set once all was done
            raise
        explained = program_failures.explained(error, program.name, program.largest)
        raise program_failures.costing_step(explained) from (None if explained is error else error)
    trace.backend.last_program = program
    elapsed = flight_ring.waited(record)
    trace.backend.launched(results if watched is None else (results[watched],))
    counters.sample(
        "EagerOpExecuteTime" if trace.eager_flush else trace.backend.runs_metric, elapsed
    )
    program.count_run()
    return elapsed


def keep_donated(
    trace: Trace, program: StepProgram, arguments: list[Buffer], given: Sequence[object]
) -> None:
    """Donate copies instead, so that the tensors keep their values should the launch fail."""
    try:
        for slot in program.donated:
            if arguments[slot] is value_of(given[slot]):
                arguments[slot] = trace.backend.copy(arguments[slot])
    except RuntimeError as error:
        if not program_failures.is_out_of_memory(error):
            raise
