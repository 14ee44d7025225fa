"""One run of a program: enqueues it, counts it, and explains errors."""

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
"""References to a buffer that only the step's inputs hold: the list, and getrefcount's argument."""


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
    """Enqueue one run of a program on ``arguments``, and count it; ``wait`` (default: False) waits for its end.

    ``recorded`` is the trace that listeners get as the one that recorded the step (default: a copy of ``trace``).
    ``watched`` is the position of a result that is sure to stay alive, for later waits (default: any result may be
    waited for).

    The list ``results`` receives the results, and then ``work`` is done, which binds them to their tensors. No
    exception can occur in between, because donated values exist only in ``results``. Raises the errors of the
    launch, and torch.OutOfMemoryError if memory runs out.
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
    """The work of ``launch`` without notifying listeners; returns the nanoseconds that it took."""
    record = flight_ring.begin(flight_ring.LAUNCH, program.name)
    given = arguments
    if any_padded():
        given = arguments_for(program.executable, arguments, program.donated)
    run = execution(program.executable, given, results)
    try:
        if wait:  # nothing is donated, and a failed run is known before its results are bound
            indivisible.do(run)
            ended = results[:]
            results.clear()
            trace.backend.client.wait(list(map(whole_buffer, ended)))
            run = map(results.extend, (ended,))
        indivisible.do(run, work)
    except Exception as error:
        flight_ring.waited(record)
        if (
            results
        ):  # the launch has succeeded, and the exception comes from elsewhere (a signal handler)
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
    """Donate copies instead, so that tensors keep their values if the launch fails."""
    try:
        for slot in program.donated:
            if arguments[slot] is value_of(given[slot]):
                arguments[slot] = trace.backend.copy(arguments[slot])
    except RuntimeError as error:
        if not program_failures.is_out_of_memory(error):
            raise
