"""What a graph of ``torch.compile`` is as one program: where its inputs come from, and what its results are.

The graph is run once on stand-ins of its arguments, and the step that this records becomes the program.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from xla_core.compilation.program_identity import of_results
from xla_core.compilation.program_table import StepProgram
from xla_core.contract.foreign_values import AnyFunction
from xla_core.dynamo.graph_inputs import GraphInputMatcher
from xla_core.execution import run_step
from xla_core.operators.plan import SEED
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import operations_of
from xla_core.recording.step_key import Lift
from xla_core.recording.storage import Storage, View, chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge import aot_graphs
from xla_core.torch_bridge.operands import Operand, Operands
from xla_core.varying import families


class NotOneProgramError(Exception):
    """A graph whose results this module cannot take from one program."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fresh:
    """A result that the program computes: its position there, and its shape and dtype."""

    position: int
    meta: TensorMeta


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """A result that shows a value which other results show, too: its position, shape and dtype, and the view."""

    position: int
    meta: TensorMeta
    view: View | None


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """A result that is an argument, or a view of one."""

    argument: int
    view: View | None


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A result that is no tensor."""

    value: Operand


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class GraphProgram:
    """A graph as one program, for arguments of certain shapes.

    ``inputs`` gives each of the program's inputs: an argument, or a storage that the graph itself holds.
    The results are the leaves of ``spec``; ``container`` is ``list`` or ``tuple`` where that is one of just these.
    ``written`` pairs arguments with the results that are their new values, ``given_away`` are arguments whose
    memory results take over, at the user's wish. ``seeds`` are the positions among ``ints`` that need a new number
    for every run.
    """

    program: StepProgram | None
    inputs: GraphInputMatcher
    results: tuple[Fresh | Shared | Passed | Constant, ...]
    written: tuple[tuple[int, int], ...]
    given_away: tuple[int, ...]
    spec: pytree.TreeSpec
    container: type[list[Operand]] | type[Operands] | None
    floats: object
    ints: np.ndarray | None
    seeds: tuple[int, ...]


def program_of_step(
    model: AnyFunction, args: Operands, trace: Trace, marks: Mapping[int, bool]
) -> GraphProgram:
    """Run ``model`` on stand-ins of ``args``, and make the program of the step that this records.

    The caller has renewed the step, holds the trace's lock, and drops the step afterwards. ``marks`` are noted
    while the model runs: by storages' ids, the values that are given away. Raises NotOneProgramError, and what
    the model raises, ValueNeededError where it reads a value.
    """
    stand_ins = [_stand_in(a, trace) if isinstance(a, XLATensor) else a for a in args]
    numbers = {id(t._s): i for i, t in enumerate(stand_ins) if isinstance(t, XLATensor)}
    results, spec = pytree.tree_flatten(model(*stand_ins))
    written = _written(stand_ins, trace)
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    kept = aot_graphs.kept_for_backward(model) if isinstance(model, fx.GraphModule) else ()
    shared = _shown_by_several([r for i, r in enumerate(results) if i not in kept], numbers, trace)
    vids = {
        id(r): r._s.vid if id(r) in shared else _value(r, numbers, written, trace) for r in tensors
    }
    computed = [v for v in vids.values() if v is not None] + list(written.values())
    outputs = tuple(dict.fromkeys(computed))
    index = {vid: i for i, vid in enumerate(outputs)}
    storages = [trace.touched[p] for p in trace.input_storages]
    inputs = GraphInputMatcher(numbers, [id(s) for s in storages], storages, numbers)
    program: StepProgram | None = None
    given_away = {}
    if outputs:
        slots = {number: slot for slot, number in enumerate(inputs.arg_idxs)}
        pairs = _pairs(written, slots)
        stays = {numbers.get(id(r._s)) for r in results if isinstance(r, XLATensor)} | set(written)
        marked = [i for s, i in numbers.items() if marks.get(s) and i in slots and i not in stays]
        fresh = [r._s for r in results if isinstance(r, XLATensor) and vids[id(r)] == r._s.vid]
        given_away = _given_away(marked, slots, stand_ins, fresh, {vid for _, vid in pairs})
        key = of_results(trace, outputs, pairs + tuple(given_away.values()))
        program = trace.cur.programs.get(key)
        if program is None or families.is_padded(program):
            program = run_step.find_or_build(trace, key, shared=False)
        index = program.output_index
    return GraphProgram(
        program=program,
        inputs=inputs,
        results=tuple(_result(r, vids, index, numbers, shared) for r in results),
        written=tuple((number, index[vid]) for number, vid in written.items()),
        given_away=tuple(given_away),
        spec=spec,
        container=_flat(spec),
        floats=trace.backend.put_numbers(np.array(trace.floats)) if trace.floats else None,
        ints=np.array(trace.ints, np.int64) if trace.ints else None,
        seeds=_seeds(trace),
    )


def _flat(spec: pytree.TreeSpec) -> type[list[Operand]] | type[Operands] | None:
    for kind in (list, tuple):
        if spec == pytree.tree_structure(kind(range(spec.num_leaves))):
            return kind
    return None


def _stand_in(a: XLATensor, trace: Trace) -> XLATensor:
    """A tensor of its own that shows what ``a`` shows."""
    if a._s.trace is not trace:
        raise NotOneProgramError(f"arguments on {a._s.trace.device} and {trace.device}")
    base = trace.from_buffer(a._s.buffer, a._s.meta)
    return base if a._v is None else tensor_on(base._s, copied_view(a._v))


def _written(stand_ins: Sequence[Operand], trace: Trace) -> dict[int, int]:
    """The arguments that the graph wrote to, and the numbers of their storages' new values."""
    written = {}
    for number, t in enumerate(stand_ins):
        if isinstance(t, XLATensor) and t._s.version:
            if not t._s.is_pending_in(trace.epoch):
                raise NotOneProgramError("an argument gets a value from the host")
            written[number] = t._s.vid
    return written


def _shown_by_several(
    results: Sequence[Operand], numbers: dict[int, int], trace: Trace
) -> set[int]:
    """The ids of results whose storages others show, too, and which the graph computes."""
    computed = [
        r
        for r in results
        if isinstance(r, XLATensor) and id(r._s) not in numbers and r._s.is_pending_in(trace.epoch)
    ]
    count = Counter(id(r._s) for r in computed)
    return {id(r) for r in computed if count[id(r._s)] > 1}


def _value(
    r: torch.Tensor, numbers: dict[int, int], written: dict[int, int], trace: Trace
) -> int | None:
    """The number of a result's value, None for one that is an unchanged argument or a view of it."""
    if not isinstance(r, XLATensor):
        raise NotOneProgramError(f"a result on {r.device}")
    number = numbers.get(id(r._s))
    if number is not None and number not in written:
        return None
    return trace.value_of(r)


def _pairs(written: dict[int, int], slots: dict[int | None, int]) -> tuple[tuple[int, int], ...]:
    """Inputs whose memory their new values may take over."""
    taken: set[int] = set()
    pairs = []
    for number, vid in written.items():
        if number in slots and vid not in taken:
            taken.add(vid)
            pairs.append((slots[number], vid))
    return tuple(pairs)


def _given_away(
    marked: Sequence[int],
    slots: dict[int | None, int],
    stand_ins: Sequence[Operand],
    fresh: Sequence[Storage],
    taken: set[int],
) -> dict[int, tuple[int, int]]:
    """The marked arguments that a result of their shape can take the memory of: input and value of each."""
    free = {s.vid: s.meta for s in fresh if s.vid not in taken}
    given = {}
    for number in marked:
        meta = stand_ins[number]._s.meta
        vid = next((v for v, m in free.items() if m is meta), None)
        if vid is not None:
            del free[vid]
            given[number] = (slots[number], vid)
    return given


def _result(
    r: Operand,
    vids: dict[int, int | None],
    index: dict[int, int],
    numbers: dict[int, int],
    shared: set[int],
) -> Fresh | Shared | Passed | Constant:
    if not isinstance(r, XLATensor):
        return Constant(r)
    vid = vids[id(r)]
    if vid is not None and id(r) in shared:
        return Shared(index[vid], r._s.meta, r._v)
    if vid is None:
        return Passed(numbers[id(r._s)], r._v)
    return Fresh(index[vid], r._v.meta if r._v is not None else r._s.meta)


def _seeds(trace: Trace) -> tuple[int, ...]:
    positions = []
    for operation in operations_of(trace.cur.path()):
        seed = operation.kwargs.get(SEED)
        if isinstance(seed, Lift):
            positions.append(seed.position)
    return tuple(positions)


def copied_view(view: View | None) -> View | None:
    """The same chain of views, of which no step knows values yet."""
    copied: View | None = None
    for v in chain(view):
        copied = View(copied, v.plan, v.tail, v.args, v.meta, -1, -1, -1)
    return copied
