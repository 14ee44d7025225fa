"""Finds the operation of a step that the compiler refuses if the compiler's error does not name it.

First every kind of operation is compiled by itself. If all of these compile, shorter and shorter prefixes of the
step are compiled. Then only the values that depend on that operation are lost (``poisoned_values``), and the error
names the user's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xla_core.compilation import build_program, progress_line
from xla_core.execution.op_by_op import Single
from xla_core.execution.replica_programs import collective_entries
from xla_core.lowering import program_failures
from xla_core.lowering.replay import needed_entries
from xla_core.operators.run_rule import LoweringError
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.entry import Entry, Operation, Root, inputs_of, operations_of
from xla_core.recording.step_key import map_operands
from xla_core.recording.step_values import ZEROS, known_plan
from xla_core.recording.trace import Trace
from xla_core.torch_bridge.operands import Operand

MSG_ALONE: Final = "{operator}{place} cannot be compiled for operands {operands}: {error}"
MSG_TOGETHER: Final = (
    "{operator}{place} cannot be compiled for operands {operands} in one program with what they are "
    "computed from: {error}. torch_xla.sync() before it makes them separate programs"
)
SEARCH: Final = "what the compiler refuses"
"""The name of the search in the progress line of a terminal."""

# An operation, and the compiler's error for it.
_Refused = tuple[Operation, Exception]


class Search:
    """The search for culprits in one step, which may have several; nothing is compiled twice."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._alone: dict[object, Exception | None] = {}
        self._works: bool | None = None

    def named(self, error: Exception, outputs: Sequence[int]) -> LoweringError | None:
        """The error that names the operation because of which ``outputs`` cannot be computed, or None.

        None if the compiler has not refused the step, if it refuses every program, or if the replicas would have
        to search together.
        """
        trace = self._trace
        if not program_failures.was_refused(error):
            return None
        entries = trace.cur.path()
        if len(trace.backend.replicas) > 1 and collective_entries(entries, outputs):
            return None
        if self._works is None:
            self._works = self._compiles_anything()
        if not self._works:
            return None
        operations = operations_of(needed_entries(entries, outputs))
        with progress_line.watching(SEARCH, len(operations)) as notice:
            notice.stage = "searching"
            refused, text = self._by_itself(operations), MSG_ALONE
            if refused is None:
                refused, text = self._by_prefixes(operations, outputs), MSG_TOGETHER
        return None if refused is None else _naming(*refused, text)

    def _compiles_anything(self) -> bool:
        zeros = known_plan(ZEROS)
        meta = tensor_meta((1,), torch.float32)
        key = (zeros.number, meta.shape, "dtype", meta.dtype)
        return self._refusal(Operation(Root(), key, zeros, meta.as_tuple, 0, 0), [0], 0) is None

    def _by_itself(self, operations: Sequence[Operation]) -> _Refused | None:
        """The first operation that is refused as a program of its own."""
        if self._trace.backend.shard_count() > 1:
            return None  # how an operation's operands are split is known only in the whole step
        for entry in operations:
            single = Single(entry)
            if single.key not in self._alone:
                results = [
                    single.last.first + i for i, m in enumerate(entry.metas) if m is not None
                ]
                self._alone[single.key] = self._refusal(single.last, results, 0)
            refused = self._alone[single.key]
            if refused is not None:
                return entry, refused
        return None

    def _by_prefixes(
        self, operations: Sequence[Operation], outputs: Sequence[int]
    ) -> _Refused | None:
        """The last operation of the shortest prefix of the step that is refused."""
        # bisection: a prefix of ``low`` operations compiles, one of ``high`` operations does not
        low, high = 0, len(operations)
        refused: Exception | None = None
        while high - low > 1 or refused is None:
            middle = (low + high) // 2 if high - low > 1 else high
            refusal = self._refusal_of_prefix(operations, middle, outputs)
            if refusal is not None:
                high, refused = middle, refusal
            elif middle == high:
                return None  # the whole step compiles now, perhaps because it does so without donations
            else:
                low = middle
        return operations[high - 1], refused

    def _refusal_of_prefix(
        self, operations: Sequence[Operation], count: int, outputs: Sequence[int]
    ) -> Exception | None:
        last = operations[count - 1]
        later = {ref.vid for entry in operations[count:] for ref in entry.references()}
        read = later.union(outputs)
        results = [
            entry.first + i
            for entry in operations[:count]
            for i, meta in enumerate(entry.metas)
            if meta is not None and entry.first + i in read
        ]
        inputs = len(inputs_of(last.path()))
        return self._refusal(last, results, inputs)

    def _refusal(self, last: Entry, outputs: Sequence[int], inputs: int) -> Exception | None:
        """The compiler's error for a step that ends at ``last`` and has the first ``inputs`` inputs of this one."""
        trace = self._trace.copy_at(last, inputs=inputs)
        return build_program.refusal(trace, tuple(outputs))


def _naming(entry: Operation, refused: Exception, text: str) -> LoweringError:
    plan = entry.plan
    operands = map_operands(_described, (*entry.args, *entry.kwargs.values()))
    failure = LoweringError(
        text.format(
            operator=plan.name,
            place=program_failures.place_of(entry),
            operands=list(operands),
            error=refused,
        )
    )
    failure.plan, failure.entry, failure.only_here = plan, entry, text is MSG_TOGETHER
    return failure


def _described(a: Operand) -> Operand:
    meta = getattr(a, "meta", None)
    if isinstance(meta, TensorMeta):
        return meta
    return getattr(a, "example", a)
