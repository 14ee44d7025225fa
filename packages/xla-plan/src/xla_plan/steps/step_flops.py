"""Counts the FLOPs of a step's products: while it is recorded, or as it was recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Final

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from xla_core.extension_api.autograd import current_backward
from xla_core.extension_api.operators import NamedOperands, Operand, Operands, flops_of
from xla_core.extension_api.steps import Entry, operations_of, products

_BACKWARD_TIMES: Final = 2
"""A product's backward pass has two products of its size, one for the gradient of each operand."""
_KERNELS: Final = frozenset({"xla::flash_attention_forward", "xla::splash_attention_forward"})
"""The kernels that are recorded for one chip's part of their operands."""
_TO_PART: Final = "xla_spmd::to_shard"
"""The operator after which kernels see one chip's part of a value."""


@dataclasses.dataclass(slots=True)
class Flops:
    """The FLOPs of a step's products outside of the backward pass, ``forward``, and inside it, ``backward``.

    The products that are computed again in the backward pass (rematerialization) belong to it.
    """

    forward: int = 0
    backward: int = 0

    def add(self, count: int, backward: bool) -> None:
        """Count a product."""
        if backward:
            self.backward += count
        else:
            self.forward += count

    @property
    def all(self) -> int:
        """Those of all products."""
        return self.forward + self.backward

    @property
    def model(self) -> int:
        """The number for model FLOP utilization: three times the forward pass, or once without a backward pass."""
        return self.forward * (1 + _BACKWARD_TIMES) if self.backward else self.forward


class StepFlops(TorchDispatchMode):
    """A context that counts the ``flops`` of what is recorded inside it."""

    sees_whole_operators: ClassVar = True
    """Layers and attention are recorded whole beside this mode: the step is the one that runs without it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = Flops()
        self._wholes: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Operands = (),
        kwargs: NamedOperands | None = None,
    ) -> Operand:
        """Run the operator, and count its FLOPs."""
        result = func(*args, **(kwargs or {}))
        name = _name_of(func)
        if name == _TO_PART:
            self._wholes[tuple(result.shape)] = _parts_of(args[0].shape, result.shape)
            return result
        formula = flops_of(func)
        if formula is not None:
            count = formula(*args, **(kwargs or {}), out_val=result)
            if name in _KERNELS:
                count *= self._wholes.get(tuple(args[0].shape), 1)
            self.flops.add(count, current_backward() >= 0)
        return result


def recorded_flops(entries: Sequence[Entry]) -> Flops:
    """Those of a recorded step."""
    wholes: dict[tuple[int, ...], int] = {}
    for operation in operations_of(entries):
        # other operations may have several results, or none
        if _name_of(operation.plan.overload) == _TO_PART:
            (part,) = operation.metas
            assert part is not None
            wholes[part.shape] = _parts_of(operation.args[0].meta.shape, part.shape)
    flops = Flops()
    for operation, count in products(entries):
        if _name_of(operation.plan.overload) in _KERNELS:
            count *= wholes.get(operation.args[0].meta.shape, 1)
        flops.add(count, operation.where is not None and operation.where.backward)
    return flops


def _name_of(overload: OpOverload) -> str:
    packet = getattr(overload, "overloadpacket", None)  # higher-order operators have none
    return getattr(packet, "_qualified_op_name", "")


def _parts_of(whole: Sequence[int], part: Sequence[int]) -> int:
    """The number of chips' parts in a value."""
    return math.prod(whole) // max(1, math.prod(part))
