"""What backends of ``torch.compile`` for other devices take from torch_xla's bridge in addition to compiling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_core.contract.foreign_values import AnyFunction
from xla_core.support import counters
from xla_core.torch_bridge import marking_ops as marking_ops
from xla_core.torch_bridge import torch_private
from xla_core.torch_bridge.operands import Operand


def dynamo_backend(fx: object, args: Sequence[Operand]) -> AnyFunction:
    """The backend ``openxla`` of ``torch.compile`` as a function: what runs the graph ``fx``."""
    compiled: AnyFunction = torch_private.dynamo_backend("openxla")(fx, args)
    return compiled


def get_fallback_ops() -> list[str]:
    """The operators that ran on the CPU and how often, such as ``aten::nonzero=2``."""
    counts = counters.all_counters()
    return [f"{name}={count}" for name, count in counts.items() if "aten::" in name and count > 0]


def dynamo_set_buffer_donor_(t: torch.Tensor, should_donoate: bool) -> torch.Tensor:
    """Mark the value of ``t`` as given away to the next program that reads it, or take it back; ``t``.

    It is the operator ``torch.ops.xla.dynamo_set_buffer_donor_``. In a compiled function it marks an argument:
    each call then gives that argument's memory to a result of the same shape and dtype, if there is one.
    """
    marked: torch.Tensor = torch.ops.xla.dynamo_set_buffer_donor_(t, should_donoate)
    return marked


class NoneRemover:
    """Takes the Nones out of a list, in place, and puts them back where they were."""

    def __init__(self) -> None:
        self._positions: list[int] = []

    def remove_nones(self, value_list: list[Operand]) -> None:
        """Take them out, and remember where they were."""
        self._positions = [i for i, value in enumerate(value_list) if value is None]
        value_list[:] = [value for value in value_list if value is not None]

    def add_nones(self, value_list: list[Operand]) -> None:
        """Put them back into a list of as many other values."""
        for position in self._positions:
            value_list.insert(position, None)


class Deduper:
    """Makes a list without repeated objects, and the list with them again."""

    def __init__(self) -> None:
        self._places: list[int] = []

    def dedup(self, values: Sequence[Operand]) -> list[Operand]:
        """The objects that are in ``values``, each once."""
        numbers: dict[int, int] = {}
        self._places = [numbers.setdefault(id(value), len(numbers)) for value in values]
        return [values[self._places.index(number)] for number in range(len(numbers))]

    def recover(self, values: Sequence[Operand]) -> list[Operand]:
        """A list as long as the one that ``dedup`` took, repeated where that one was."""
        return [values[place] for place in self._places]
