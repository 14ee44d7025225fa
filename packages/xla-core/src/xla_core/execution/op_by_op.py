"""``GET_TENSORS_OPBYOP`` and ``SYNC_TENSORS_OPBYOP``: runs a recorded step as a chain of small programs.

For debugging, and for code whose steps are all different: each operator is lowered, compiled and run by
itself, and its program is looked up by operator, shapes and constants, wherever in a step the operator is.
"""

from __future__ import annotations

import numpy as np

from xla_core.compilation import build_program, program_identity, program_table
from xla_core.contract.device_protocol import Buffer
from xla_core.lowering.replay import needed_entries
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Excerpt, Operation, operations_of
from xla_core.recording.evictable import Table
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.trace import Trace
from xla_core.support import counters
from xla_core.varying.padded_buffer import exact_buffer

_programs = Table()


class Single(Excerpt):
    """One operation as a separate step, whose inputs are what it reads. Equal ``key`` means equal programs."""

    def __init__(self, entry: Operation) -> None:
        super().__init__()
        self.entry = entry
        for ref in entry.references():
            if ref.vid not in self.vids:
                self.add_input(ref.vid, ref.meta)
        self.inputs = tuple(self.vids)
        copy = self.add_operation(entry)
        operands = _frozen(copy.args), _frozen(tuple(copy.kwargs.items()))
        self.key = (entry.plan, *operands, entry.metas)


def _frozen(a: object) -> object:
    """A hashable form of an argument, in which numbers of different types differ."""
    if isinstance(a, Ref):
        return ("value", a.vid, a.meta)
    if isinstance(a, Lift):
        example = a.example if isinstance(a.example, TensorMeta) else type(a.example)
        return ("lifted", a.is_float, a.position, example)
    if isinstance(a, (list, tuple)):
        return tuple(map(_frozen, a))
    return (type(a), repr(a)) if isinstance(a, (bool, int, float, complex)) else a


def run(trace: Trace, outputs: tuple[int, ...]) -> dict[int, Buffer]:
    """The buffers of the values ``outputs`` of the step that ends at the trace's current entry."""
    needed = needed_entries(trace.cur.path(), outputs)
    values = {vid: exact_buffer(trace.inputs[slot]) for vid, slot in trace.input_vids.items()}
    singles = [Single(operation) for operation in operations_of(needed)]
    last_use = {vid: i for i, single in enumerate(singles) for vid in single.inputs}
    wanted = set(outputs)
    for position, single in enumerate(singles):
        values.update(_run_single(trace, single, values))
        for vid in single.inputs:
            if last_use[vid] == position and vid not in wanted:
                del values[vid]
    return {vid: values[vid] for vid in outputs}


def _run_single(trace: Trace, single: Single, values: dict[int, Buffer]) -> dict[int, Buffer]:
    entry = single.entry
    key = program_identity.in_memory(trace, single.key)
    program = _programs.get(key)
    wanted = tuple(i for i, meta in enumerate(entry.metas) if meta is not None)
    first = single.last.first
    if program is None:
        alone = trace.copy_at(single.last, single=True)
        program = build_program.build(alone, tuple(first + i for i in wanted), ())
        program.keep(_programs, key)
        program_table.register(program)
    arguments = [values[vid] for vid in single.inputs]
    if single.floats:
        floats = np.array([trace.floats[i] for i in single.floats], np.float64)
        arguments.append(trace.backend.put_numbers(floats))
    if single.ints:
        ints = np.array([trace.ints[i] for i in single.ints], np.int64)
        arguments.append(trace.backend.put_numbers(ints))
    results = program.executable.execute(arguments)
    program.count_run()
    counters.increment("OpByOpExecute")
    trace.backend.launched(results)
    return {entry.first + i: results[program.output_index[first + i]] for i in wanted}
