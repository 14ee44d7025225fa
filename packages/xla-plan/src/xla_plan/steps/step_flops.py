"""Counts the FLOPs of a step's products while it is recorded."""

from __future__ import annotations

import math
from typing import ClassVar, Final

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from xla_core.extension_api.autograd import current_backward
from xla_core.extension_api.operators import NamedOperands, Operand, Operands, flops_of

_BACKWARD_TIMES: Final = 2
"""A product's backward pass has two products of its size, one for the gradient of each operand."""


_KERNELS: Final = frozenset({"xla::flash_attention_forward", "xla::splash_attention_forward"})
"""The kernels that are recorded for one chip's part of their operands."""
_TO_PART: Final = "xla_spmd::to_shard"
"""The operator after which kernels see one chip's part of a value."""


class StepFlops(TorchDispatchMode):
    """A context that counts the FLOPs of products: ``forward`` outside and ``backward`` inside the backward pass.

    ``model`` is the number for model FLOP utilization, three times that of the forward pass, without the products
    that are computed again in the backward pass (rematerialization).
    """

    sees_whole_operators: ClassVar = True
    """Layers and attention are recorded whole beside this mode: the step is the one that runs without it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
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
        packet = getattr(func, "overloadpacket", None)
        name = getattr(packet, "_qualified_op_name", "")
        if name == _TO_PART:
            # the following kernels are recorded for one chip's part
            self._wholes[tuple(result.shape)] = math.prod(args[0].shape) // max(1, result.numel())
            return result
        formula = flops_of(func)
        if formula is None:
            return result
        count = formula(*args, **(kwargs or {}), out_val=result)
        if name in _KERNELS:
            count *= self._wholes.get(tuple(args[0].shape), 1)
        if current_backward() < 0:
            self.forward += count
        else:
            self.backward += count
        return result

    @property
    def model(self) -> int:
        """The FLOPs of the step on all chips; those of the forward pass if there is no backward pass."""
        return self.forward * (1 + _BACKWARD_TIMES) if self.backward else self.forward
