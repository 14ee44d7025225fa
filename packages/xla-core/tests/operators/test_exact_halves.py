"""Sums, differences and products of bfloat16, which need no float32 between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import torch_xla.core.xla_model as xm

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "rsub": torch.rsub,
    "neg": lambda a, b: -a,
    "in place": lambda a, b: a.clone().add_(b).mul_(b),
    "foreach": lambda a, b: torch._foreach_mul([a], [b])[0],
    "chain": lambda a, b: (a + b) * a - b,
    "without dimensions": lambda a, b: a * b[0, 0],
}
# These have another operand than two of bfloat16, and compute in float32.
WIDER: dict[str, Callable[..., torch.Tensor]] = {
    "number": lambda a, b: a * 0.3,
    # the CPU's vectors round another factor to bfloat16, the elements behind them do not
    "alpha": lambda a, b: torch.add(a, b, alpha=0.25),
    "whole numbers": lambda a, b: a + torch.arange(50, device=a.device),
    "scalar of float32": lambda a, b: a * torch.tensor(0.3, device=a.device),
}


def operands() -> Sequence[torch.Tensor]:
    """Numbers of many sizes, the smallest and largest, and what is not a number."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-4, 5, (2, 200, 50), generator=generator)
    values = (torch.randn((2, 200, 50), generator=generator) * sizes).bfloat16()
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, 2.0, 1.0])
    values[0, 0], values[1, 0] = (t.repeat(7)[:50] for t in (special, special.roll(3)))
    return values[0], values[1]


@pytest.mark.parametrize("name", [*FUNCTIONS, *WIDER])
def test_bits_are_the_cpus(name: str) -> None:
    function = {**FUNCTIONS, **WIDER}[name]
    host = operands()
    torch.testing.assert_close(
        function(*(t.to("xla") for t in host)).cpu(),
        function(*host),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_converted(name: str) -> None:
    device = [t.to("xla") for t in operands()]
    assert "f32" not in xm.get_stablehlo([FUNCTIONS[name](*device)]).replace("bf16", "")


def test_float16_is_computed_in_float32() -> None:
    host = [t.half() for t in operands()]
    device = [t.to("xla") for t in host]
    assert "f32" in xm.get_stablehlo([device[0] * device[1]])
    torch.testing.assert_close(
        (device[0] * device[1]).cpu(), host[0] * host[1], rtol=0, atol=0, equal_nan=True
    )
