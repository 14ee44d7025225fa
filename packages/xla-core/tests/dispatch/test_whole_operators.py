"""Operators that are recorded as one, and where they are still recorded by parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import torch_xla
from xla_core.execution import runtime
from xla_core.recording.entry import operations_of


def recorded(run: Callable[[], Any]) -> list[str]:
    """Names of the operators that ``run`` records."""
    torch_xla.sync()
    trace = runtime.trace_of(None)
    kept = run()
    names = [operation.plan.name for operation in operations_of(trace.cur.path())]
    torch_xla.sync()
    del kept
    return names


def on_both(run: Callable[..., Sequence[torch.Tensor]], *shapes: tuple[int, ...]) -> None:
    """Compare the tensors that ``run`` gives of random ones with the CPU's."""
    torch.manual_seed(0)
    host = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    device = [t.detach().to("xla").requires_grad_() for t in host]
    for ours, theirs in zip(run(*device), run(*host), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def gradients(function: Callable[..., torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """The function that gives the gradients of ``function``'s squares by all its operands."""
    return lambda *operands: torch.autograd.grad(function(*operands).square().sum(), operands)


LINEAR = {
    "layer": ((6, 4), (5, 4), (5,)),
    "without bias": ((6, 4), (5, 4)),
    "batches": ((2, 3, 4), (5, 4), (5,)),
    "no rows": ((0, 4), (5, 4), (5,)),
    "vector": ((4,), (5, 4), (5,)),
    "weight as a vector": ((6, 4), (4,)),
    "bias of a row each": ((6, 4), (5, 4), (6, 5)),
}


@pytest.mark.parametrize("shapes", LINEAR.values(), ids=LINEAR)
def test_linear_and_its_gradients_are_the_cpus(shapes: tuple[tuple[int, ...], ...]) -> None:
    on_both(lambda *operands: [F.linear(*operands)], *shapes)
    on_both(gradients(F.linear), *shapes)


def test_gradients_of_gradients_of_linear() -> None:
    def penalty(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        (by_x,) = torch.autograd.grad(F.linear(x, w, b).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(by_x.square().sum(), (x, w, b))

    on_both(penalty, (2, 3, 4), (5, 4), (5,))


def test_a_layer_is_one_operation_each_way() -> None:
    x, layer = torch.randn(2, 3, 4).to("xla"), torch.nn.Linear(4, 5).to("xla")
    assert recorded(lambda: layer(x)) == ["aten.linear.default"]
    names = recorded(lambda: torch.autograd.grad(layer(x).sum(), list(layer.parameters())))
    assert [name for name in names if "sum" not in name and "expand" not in name] == [
        "aten.linear.default", "aten.ones_like.default", "aten.linear_backward.default",
    ]  # fmt: skip
    with torch.inference_mode():
        assert recorded(lambda: layer(x)) == ["aten.linear.default"]


def test_who_looks_at_operators_sees_the_parts() -> None:
    x = torch.randn(6, 4).to("xla")
    layer = torch.nn.Linear(4, 5).to("xla")
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 6 * 4 * 5)  # forward, and the weight's gradient


def test_forward_mode_goes_through_the_parts() -> None:
    def tangent(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(w.detach(), torch.ones_like(w))
            return [forward_ad.unpack_dual(F.linear(x, dual)).tangent]

    on_both(tangent, (6, 4), (5, 4))
    on_both(lambda x, w: [torch.func.jvp(lambda v: F.linear(x, v), (w,), (w,))[1]], (6, 4), (5, 4))


def test_mistakes_are_the_cpus() -> None:
    x = torch.randn(6, 4).to("xla")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        F.linear(x, torch.randn(5, 3).to("xla"))
    with pytest.raises(RuntimeError, match="Input tensor is not an XLA tensor"):
        F.linear(x, torch.randn(5, 4))
