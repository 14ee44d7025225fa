"""Every operator of PyTorch's operator database on views: values, and what writes leave around them.

Views of an ``xla`` tensor report that they are contiguous. What C++ defines by the strides or the offset of its
operand is wrong for them without anybody noticing, unless the device takes care of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from xla_core.testing.against_cpu import attempt, forget_pending
from xla_core.testing.op_db import (
    HOST_ARGUMENTS,
    RANDOM,
    UNWRITTEN,
    assert_agrees,
    chosen,
    name_of,
)

pytestmark = [
    pytest.mark.sweep,
    # The database itself calls deprecated forms, and fallbacks and as_strided warn; both are checked otherwise.
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES: Final = 3
# Operators whose result on a view differs from the CPU's, and why.
OTHERWISE: Final = {
    "as_strided": "reads what lies around the view, by the CPU's strides",
    "as_strided.partial_views": "reads what lies around the view, by the CPU's strides",
    "as_strided_copy": "reads what lies around the view, by the CPU's strides",
    "as_strided_scatter": "reads what lies around the view, by the CPU's strides",
    "sparse.mm.reduce": "no xla tensor is compressed",
    "sparse.sampled_addmm": "no xla tensor is compressed",
    "resize_": "the database resizes a clone, which on the CPU has the view's strides",
    "resize_as_": "the database resizes a clone, which on the CPU has the view's strides",
}


def _surrounded(values: torch.Tensor) -> torch.Tensor:
    base = torch.ones([size + 1 for size in values.shape], dtype=values.dtype)
    base[_inner(values.dim())] = values
    return base


def _inner(dims: int) -> tuple[slice, ...]:
    return (slice(1, None),) * dims


def _reversed(t: torch.Tensor) -> torch.Tensor:
    return t.permute(*reversed(range(t.dim())))


# how the operand's values are put into a larger or a transposed tensor -> the view of it that shows them
VIEWS: dict[str, tuple[Callable[[Any], torch.Tensor], Callable[[Any], torch.Tensor]]] = {
    "an inner part": (_surrounded, lambda base: base[_inner(base.dim())]),
    "transposed": (lambda t: _reversed(t).contiguous(), _reversed),
    "every second": (lambda t: t.repeat_interleave(2, -1), lambda base: base[..., ::2]),
}


class Operands:
    """The operands of a sample on a device as views, and the tensors that they are views of."""

    def __init__(self, op: OpInfo, sample: SampleInput, device: str, view: str) -> None:
        self.bases: list[torch.Tensor] = []
        self._device = device
        self._hold, self._show = VIEWS[view]
        self.input = pytree.tree_map(self._seen, sample.input)
        of_host = op.name in HOST_ARGUMENTS
        self.args = sample.args if of_host else pytree.tree_map(self._seen, sample.args)
        self.kwargs = pytree.tree_map(self._seen, dict(sample.kwargs))
        if "device" in self.kwargs:
            self.kwargs["device"] = torch.device(device)

    def _seen(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        values = leaf.detach().clone()
        if not values.dim():
            self.bases.append(torch.stack([values, values]).to(self._device))
            return self.bases[-1][1]
        self.bases.append(self._hold(values).to(self._device))
        return self._show(self.bases[-1])


def run(
    op: OpInfo, sample: SampleInput, device: str, view: str, in_place: bool
) -> tuple[Any, list[torch.Tensor]]:
    """What the operator gives for a sample of views, and what is in the tensors behind them afterwards."""
    given = Operands(op, sample, device, view)
    function = op.inplace_variant if in_place else op
    result = function(given.input, *given.args, **given.kwargs)
    return result, [base.cpu() for base in given.bases]


def compare(op: OpInfo, dtype: torch.dtype, sample: SampleInput, view: str, in_place: bool) -> None:
    expected = attempt(partial(run, op, sample, "cpu", view, in_place))
    if expected.error is not None:
        return  # on the CPU, too, some operators take no views
    got = attempt(partial(run, op, sample, "xla", view, in_place))
    if got.error is not None:
        forget_pending()
        raise got.error
    assert_agrees(op, sample, dtype, expected.value[0], got.value[0])
    if op.name in RANDOM or op.name in UNWRITTEN:
        return
    for of_xla, of_cpu in zip(got.value[1], expected.value[1], strict=True):
        # results of float32 operators, rounded otherwise
        torch.testing.assert_close(of_xla, of_cpu, equal_nan=True, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("op", op_db, ids=name_of)
def test_operators_on_views(op: OpInfo, dtype: torch.dtype) -> None:
    if dtype not in op.dtypes:
        pytest.skip("PyTorch has no CPU kernel for this dtype")
    if name_of(op) in OTHERWISE:
        pytest.skip(OTHERWISE[name_of(op)])
    for sample in chosen(op, dtype, SAMPLES):
        for view in VIEWS:
            compare(op, dtype, sample, view, in_place=False)
            if op.inplace_variant is not None and not sample.broadcasts_input:
                compare(op, dtype, sample, view, in_place=True)
