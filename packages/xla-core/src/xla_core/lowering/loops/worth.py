"""Decides whether a loop pays on a device: what its iterations copy must be small beside what they compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from xla_core.contract.device_protocol import Loops
from xla_core.lowering.loops.wiring import Draft
from xla_core.operators.product_flops import flops_of
from xla_core.operators.tensor_meta import TensorMeta


class Worth:
    """Says of a draft whether the loop pays, by the conditions of ``loops``.

    ``metas`` are shapes and dtypes by value number, ``inputs`` the numbers of the program's inputs.
    ``gathered(parameter, value)`` is that of ``Layout``.
    """

    def __init__(
        self,
        loops: Loops,
        metas: Mapping[int, TensorMeta | None],
        inputs: Collection[int],
        gathered: Callable[[int, int], int],
    ) -> None:
        self.loops = loops
        self.metas = metas
        self.inputs = frozenset(inputs)
        self.gathered = gathered

    def __call__(self, draft: Draft) -> bool:
        """Whether the loop pays."""
        # An optimizer's update would copy parameters and state into stacks to read each number once.
        products = any(flops_of(n.payload.entry.plan.overload) is not None for n in draft.body)
        return products and self._gathers(draft) and self._saves_little(draft)

    def _gathers(self, draft: Draft) -> bool:
        """Whether at least half of what is copied is gathered from enough devices."""
        # A backward pass carries gradients, of which less is known than of what it reads of the forward pass.
        computed = [v for row in draft.rows if _differs(row) for v in row if v not in self.inputs]
        copied = enough = 0
        for parameter in self._parameters(draft):
            copied += self._nbytes(parameter)
            parts = max((self.gathered(parameter, v) for v in computed), default=1)
            enough += self._nbytes(parameter) if parts >= self.loops.min_gathered else 0
        return 2 * enough >= copied

    def _saves_little(self, draft: Draft) -> bool:
        """Whether iterations write and read little beside what goes from one to the next."""
        own = {self.metas[v] for v in self._parameters(draft)}
        passed_on = read = 0
        for row in draft.rows:
            if draft.carried_from(row) is not None:
                passed_on += self._nbytes(row[1])
            elif _differs(row) and row[0] not in self.inputs:
                read += self._nbytes(row[0])
        left = sum(
            self._nbytes(v)
            for v, needed in zip(draft.values[0], draft.kept(), strict=True)
            if needed and self.metas[v] not in own
        )
        return max(read, left) <= self.loops.max_saved * max(passed_on, 1)

    def _parameters(self, draft: Draft) -> list[int]:
        """One of the inputs of each stack of inputs that the loop reads."""
        return [row[0] for row in draft.rows if _differs(row) and row[0] in self.inputs]

    def _nbytes(self, value: int) -> int:
        meta = self.metas[value]
        assert meta is not None
        return meta.nbytes


def _differs(row: Sequence[int]) -> bool:
    """Whether a row is of values, not of lifted numbers, and not of one that is the same in all iterations."""
    return row[0] >= 0 and len(set(row)) > 1
