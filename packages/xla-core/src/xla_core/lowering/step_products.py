"""The products of a recorded step: which operations have one, and how large it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from xla_core.operators.product_flops import flops_of
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.step_key import Lift, Ref


def products(entries: Iterable[Entry]) -> Iterator[tuple[Operation, int]]:
    """The operations with a product, and its multiplications and additions, without bodies of loops."""
    for operation in operations_of(entries):
        formula = flops_of(operation.plan.overload)
        if formula is not None:
            result = [None if m is None else _meta_tensor(m) for m in operation.metas]
            args = [_example(a) for a in operation.args]
            kwargs = {name: _example(a) for name, a in operation.kwargs.items()}
            out = result[0] if len(result) == 1 else result
            yield operation, formula(*args, **kwargs, out_val=out)


def _example(operand: object) -> object:
    """An operand as torch's formulas take it: they read shapes only, so any number stands for a lifted one."""
    if isinstance(operand, Ref):
        return _meta_tensor(operand.meta)
    if isinstance(operand, Lift):
        return 1
    if isinstance(operand, (list, tuple)):
        return type(operand)(map(_example, operand))
    return operand


def _meta_tensor(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
