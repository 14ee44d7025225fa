"""Root mean square norm and the gradients of activations, recorded as one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torch_xla
from xla_core.execution import runtime
from xla_core.recording.entry import operations_of

# what the CPU says of operands of different dtypes
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")

NORM, BY_NORM = "aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"


def recorded(run: Callable[[], Any]) -> list[str]:
    """Names of the operators that ``run`` records."""
    torch_xla.sync()
    kept = run()
    names = [operation.plan.name for operation in operations_of(runtime.trace_of(None).cur.path())]
    torch_xla.sync()
    del kept
    return names


def on_both(run: Callable[..., Sequence[torch.Tensor]], *host: torch.Tensor) -> None:
    """Compare what ``run`` gives of operands and of copies on the device, dtypes included."""
    device = [t.detach().to("xla").requires_grad_(t.requires_grad) for t in host]
    for ours, theirs in zip(run(*device), run(*host), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def operand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        .to(dtype)
        .requires_grad_()
    )


def with_gradients(function: Callable[..., torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    def run(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        result = function(*operands)
        wanted = [t for t in operands if t.requires_grad]
        return [result, *torch.autograd.grad(result.square().sum(), wanted)]

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("sizes", [(8,), (4, 8)])
def test_norms_and_their_gradients_are_the_cpus(
    sizes: tuple[int, ...], eps: float | None, dtype: torch.dtype
) -> None:
    x = operand(3, 4, 8, dtype=dtype)
    on_both(with_gradients(lambda x: F.rms_norm(x, sizes, None, eps)), x)
    weights = [operand(*sizes, dtype=dtype)]
    if dtype in (torch.bfloat16, torch.float16):
        weights.append(
            operand(*sizes)
        )  # as under autocast: the gradient has this dtype and its digits
    for weight in weights:
        on_both(with_gradients(lambda x, w: F.rms_norm(x, sizes, w, eps)), x, weight)


def test_a_norm_is_one_operator_each_way() -> None:
    x, norm = operand(3, 8).detach().to("xla"), torch.nn.RMSNorm(8).to("xla")
    assert recorded(lambda: norm(x)) == [NORM]
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert recorded(lambda: norm(x)) == [NORM]
    names = recorded(lambda: torch.autograd.grad(norm(x).sum(), list(norm.parameters())))
    assert names.count(NORM) == names.count(BY_NORM) == 1
    assert not any("rsqrt" in name or "pow" in name for name in names)


def test_who_needs_the_parts_of_a_norm_gets_them() -> None:
    x, weight = operand(3, 8), operand(8)

    def penalty(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        (by_x,) = torch.autograd.grad(F.rms_norm(x, (8,), w).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(by_x.square().sum(), (x, w))

    on_both(penalty, x, weight)
    on_both(lambda x: [torch.func.jvp(lambda v: F.rms_norm(v, (8,)), (x,), (x,))[1]], x)
    on_both(lambda x: [torch.vmap(lambda v: F.rms_norm(v, (8,)))(x)], x)
    empty = torch.empty(0, 8)
    on_both(lambda x: [F.rms_norm(x, (8,))], empty)
    on_both(
        with_gradients(lambda x, w: F.rms_norm(x, (8,), w)),
        x.detach().double().requires_grad_(),
        weight,
    )


@pytest.mark.parametrize("operands", [((3, 8), (7,)), ((3, 8), (8,), (7,)), ((3, 8), ())])
def test_mistakes_are_the_cpus(operands: tuple[tuple[int, ...], ...]) -> None:
    x, sizes, *weight = operands
    host = [operand(*shape).detach() for shape in (x, *weight)]
    with pytest.raises(RuntimeError) as wanted:
        F.rms_norm(host[0], sizes, *host[1:])
    with pytest.raises(RuntimeError) as got:
        F.rms_norm(host[0].to("xla"), sizes, *(t.to("xla") for t in host[1:]))
    assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_gradients_of_activations_are_rounded_once(function: Callable[..., torch.Tensor]) -> None:
    """C++ defines them by seven operators for devices that it does not know."""
    x = operand(6, 8, dtype=torch.bfloat16)
    on_both(with_gradients(function), x)
    device = x.detach().to("xla").requires_grad_()
    names = recorded(lambda: torch.autograd.grad(function(device).sum(), device))
    assert f"aten.{function.__name__}_backward.default" in names
    assert not any(name.startswith(("aten.sigmoid", "aten.sub")) for name in names)
    on_both(
        lambda x: torch.autograd.grad(
            torch.autograd.grad(function(x).sum(), x, create_graph=True)[0].sum(), x
        ),
        operand(6, 8),
    )
