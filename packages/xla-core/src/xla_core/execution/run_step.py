"""Runs a recorded step: finds the values that are still wanted and the program that computes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from sys import getrefcount
from typing import Final

from xla_core.compilation import build_program
from xla_core.compilation.program_identity import ProgramIdentity, StepResults, of_results
from xla_core.compilation.program_table import StepProgram, hold, register
from xla_core.contract import events
from xla_core.contract.device_protocol import Buffer
from xla_core.execution import (
    culprits,
    deferred_steps,
    index_checks,
    op_by_op,
    operator_counts,
    poisoned_values,
)
from xla_core.launching import buffer_donation, host_steps, launch_queue
from xla_core.launching.program_launch import INPUT_ONLY, keep_donated, launch
from xla_core.operators.error_messages import ValueNeededError
from xla_core.operators.run_rule import LoweringError
from xla_core.recording.storage import MSG_PLACEHOLDER, NoValueError, Storage, binding
from xla_core.recording.trace import Trace
from xla_core.support import counters, flags, indivisible
from xla_core.torch_bridge.aot_graphs import untraced
from xla_core.varying import families

# References to a storage that only the trace holds: the list, the loop variable, getrefcount's argument.
_TRACE_ONLY: Final = 3


@untraced
def flush(trace: Trace, reading: bool = False, ending: bool = False, shared: bool = True) -> None:
    """Run what is pending on a device and bind the results; returns once the work is enqueued.

    If an operation cannot be lowered or compiled, the values that depend on it are poisoned, the others are
    computed, and LoweringError is raised. If that operation cannot be found, or the launch fails, all values of the
    step are poisoned and the error is raised: torch.OutOfMemoryError if memory ran out. Tensors that had values
    before the step return to them. Values that depend on placeholders are poisoned, the others are computed, and
    NoValueError is raised. After other exceptions (Ctrl-C, one from a listener) the step is pending as before.
    ``reading`` (default: False) says that a value is about to be fetched, ``ending`` (default: False) that the user
    ends the step here. With ``shared=False`` (default: True) a new program serves only the sizes of this step.
    """
    with trace.lock:
        if trace.forbidden is not None and trace.cur.depth:
            events.emit(events.ExecutionRefused(trace=trace))
            raise ValueNeededError(trace.forbidden)
        started = time.perf_counter_ns()
        if launch_queue.any_awaited():
            deferred_steps.catch_up(trace)
        last, epoch = trace.cur, trace.epoch
        operations = last.depth
        one_by_one = (flags.GET_OPBYOP if reading else flags.SYNC_OPBYOP).get()
        needs_placeholders = trace.has_placeholders and poisoned_values.poison_placeholders(trace)
        try:
            _flush(trace, one_by_one, reading, ending, shared)
        except Exception as error:
            if not poisoned_values.costs_values(error):
                raise
            deferred_steps.settle(trace)
            named = _poison_and_run_rest(trace, one_by_one, error, culprits.Search(trace))
            if named is error:
                raise
            raise named from error
        finally:
            if operations and trace.epoch != epoch:
                operator_counts.step_ended(epoch, last)
        if needs_placeholders:
            raise NoValueError(MSG_PLACEHOLDER)
        if operations:
            elapsed = time.perf_counter_ns() - started
            if events.listening(events.Flushed):
                flushed = events.Flushed(trace=trace, operations=operations, nanoseconds=elapsed)
                events.emit(flushed)
        if index_checks.pending:
            index_checks.look(trace)


def _poison_and_run_rest(
    trace: Trace, one_by_one: bool, error: Exception, search: culprits.Search
) -> Exception:
    """Poison the values that cannot be computed because of ``error``, and run the rest of the step.

    Returns ``error``, or an error that names the operation.
    """
    error = search.named(error, tuple(wanted(trace)[2])) or error
    if not (isinstance(error, LoweringError) and poisoned_values.poison_dependents(trace, error)):
        poisoned_values.poison_step(trace, error)
    try:
        _flush(trace, one_by_one)
    except Exception as another:
        if not poisoned_values.costs_values(another):
            raise
        # terminates, because fewer values are pending each time
        _poison_and_run_rest(trace, one_by_one, another, search)
    return error


def _flush(
    trace: Trace,
    one_by_one: bool,
    reading: bool = False,
    ending: bool = False,
    shared: bool = True,
) -> None:
    waiting = trace.backend.queue.unsettled
    if waiting and (one_by_one or trace.eager_flush or deferred_steps.is_watched()):
        deferred_steps.settle(trace)
    alive, passed, outputs = wanted(trace)
    adopted = [trace.backend.buffer_for_copy(s, trace.inputs[slot]) for s, slot in passed]
    adoption = binding([s for s, _ in passed], adopted)
    if launch_queue.any_awaited():
        deferred_steps.note_adopted([s for s, _ in passed], adopted)
    if not outputs:
        indivisible.do(adoption, trace.renewal())
    elif one_by_one:
        values = op_by_op.run(trace, tuple(outputs))
        computed = binding(alive, [values[s.vid] for s in alive])
        indivisible.do(adoption, computed, trace.renewal())
    else:
        key, given = _step_key(trace, alive, outputs, ending)
        counters.sample("TensorsGraphSize", trace.cur.depth, counters.render_number)
        program = trace.cur.programs.get(key)
        if not shared and program is not None and families.is_padded(program):
            program = None
        small = host_steps.run(trace, key.what.outputs) if program is None and reading else None
        if small is not None:
            computed = binding(alive, [small[s.vid] for s in alive])
            indivisible.do(adoption, computed, trace.renewal())
            return
        if program is None:
            beside = not given and (
                bool(waiting) or (not reading and deferred_steps.may_wait(trace))
            )
            program = find_or_build(trace, key, beside, shared)
        else:
            counters.increment("CachedCompile")
        if waiting or not program.is_made():
            deferred_steps.defer(trace, program, alive, adoption)
            return
        _run(
            trace, program, alive, adoption, buffer_donation.holders(trace, given) if given else {}
        )


def warm_up(trace: Trace) -> None:
    """Make the program of the pending step without running it, so that the next sync finds it."""
    with trace.lock:
        alive, _, outputs = wanted(trace)
        if outputs:
            key, _ = _step_key(trace, alive, outputs, ending=False)
            if key not in trace.cur.programs:
                find_or_build(trace, key)


def _step_key(
    trace: Trace, alive: list[Storage], outputs: dict[int, None], ending: bool
) -> tuple[ProgramIdentity[StepResults], buffer_donation.Pairs]:
    """The identity of the pending step's program, and those of its donations that the user asked for."""
    pairs = _donations(trace, outputs)
    given = buffer_donation.pairs(trace, alive, pairs, ending)
    return of_results(trace, tuple(outputs), pairs + given, given), given


def wanted(trace: Trace) -> tuple[list[Storage], list[tuple[Storage, int]], dict[int, None]]:
    """Storages of values to compute, storages whose value is an input's, and the numbers of the values.

    Those that the step met last come first. XLA's memory scheduler orders a program after the order of its
    results: when a training step returned its parameters as the forward pass meets them, the first of them waited
    for the whole backward pass, and the large gradients at its beginning stayed in memory meanwhile.
    """
    epoch = trace.epoch
    input_vids = trace.input_vids
    alive: list[Storage] = []
    passed: list[tuple[Storage, int]] = []
    outputs: dict[int, None] = {}
    for s in reversed(trace.touched):
        if s.buffer is None and getrefcount(s) > _TRACE_ONLY and s.epoch == epoch:
            slot = input_vids.get(s.vid)
            if slot is None:
                outputs[s.vid] = None
                alive.append(s)
            else:
                passed.append((s, slot))
    return alive, passed, outputs


def _donations(trace: Trace, outputs: dict[int, None]) -> tuple[tuple[int, int], ...]:
    """Pairs of an input's slot and the value that its storage holds at the end of the step."""
    epoch = trace.epoch
    pairs = []
    taken = set()
    touched = trace.touched
    for slot, position in enumerate(trace.input_storages):
        s = touched[position]
        # the same as is_pending_in, without a call for each input
        if s.buffer is None and s.epoch == epoch and s.vid in outputs and s.vid not in taken:
            taken.add(s.vid)
            pairs.append((slot, s.vid))
    return tuple(pairs)


def find_or_build(
    trace: Trace, key: ProgramIdentity[StepResults], beside: bool = False, shared: bool = True
) -> StepProgram:
    """An existing program that computes at least the wanted values, or a new one.

    With ``beside`` (default: False), a new program may still be compiling when this returns. With ``shared=False``
    (default: True) it serves only the sizes of this step, because a program that runs again and again should not
    compute on padding.

    Reference cycles keep values alive until the garbage collector runs. So a program that computes a few more
    values than are wanted is used as well, which saves a compilation.
    """
    results = key.what
    wanted = set(results.outputs)
    for known, program in list(trace.cur.programs.items()):
        # a program must also take the memory that the user gives away
        if known.surroundings != key.surroundings or known.what.taken != results.taken:
            continue
        if not shared and families.is_padded(program):
            continue
        if wanted <= program.output_index.keys() and not program.wasteful(wanted):
            trace.cur.keep(key, program)
            hold(program)  # the thread of another device may have evicted it in the meantime
            counters.increment("CachedCompile")
            return program
    program = families.serve(trace, key) if shared else None
    if program is None:
        metric = "EagerOpCompileTime" if trace.eager_flush else "CompileTime"
        program = build_program.build(trace, results.outputs, results.donations, metric, beside)
    trace.cur.keep(key, program)
    register(program)
    return program


def _run(
    trace: Trace,
    program: StepProgram,
    alive: list[Storage],
    adoption: Iterable[object],
    held: dict[int, Storage],
) -> None:
    """Run the pending step and bind its results; ``held`` are the storages of values that the user gives away."""
    arguments = list(trace.inputs)
    # a launch that fails for lack of memory has consumed the donated buffers nevertheless
    safe = not program.donated or trace.backend.has_room(program.memory_needed())
    for slot in program.donated:
        # ``trace.inputs`` and ``arguments`` hold it; any other reference still needs the old value.
        if getrefcount(trace.inputs[slot]) > INPUT_ONLY + 1 + (slot in held):
            arguments[slot] = trace.backend.copy(arguments[slot])
            program.copied_donations += 1
    if not safe:
        keep_donated(trace, program, arguments, trace.inputs)
    arguments += deferred_steps.numbers_of(trace)
    index = program.output_index
    results: list[Buffer] = []
    computed = map(results.__getitem__, [index[s.vid] for s in alive])
    bound = binding(alive, computed)
    released = buffer_donation.releasing(held.values()) if held else ()
    work = itertools.chain(adoption, released, bound, trace.renewal())
    launch(trace, program, arguments, results, work, wait=not safe)
