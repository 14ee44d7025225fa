"""Python numbers among the operands: they change from step to step, and no program with them."""

from __future__ import annotations

import math

import pytest
import torch

import torch_xla

X = [1.0, -2.0, 0.5, 3.0]

VARIED = {
    "add": lambda x, v: x + v,
    "add alpha": lambda x, v: torch.add(x, x, alpha=v),
    "sub": lambda x, v: x - v,
    "rsub": lambda x, v: v - x,
    "mul": lambda x, v: x * v,
    "div": lambda x, v: x / v,
    "rdiv": lambda x, v: v / x,
    "in place": lambda x, v: x.clone().mul_(v).add_(v),
    "clamp": lambda x, v: x.clamp(-v, v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "where": lambda x, v: torch.where(x > 0, x, v),
    "fill_": lambda x, v: torch.empty_like(x).fill_(v) + x,
    "full": lambda x, v: torch.full((4,), v, device=x.device) + x,
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "addcdiv": lambda x, v: torch.addcdiv(x, x, x, value=v),
    "lerp": lambda x, v: torch.lerp(x, x * x, v),
    "comparison": lambda x, v: x > v,
    "foreach mul": lambda x, v: torch._foreach_mul([x, x], v)[1],
    "foreach list": lambda x, v: torch._foreach_mul([x, x], [v, v + 1])[1],
    "foreach add": lambda x, v: torch._foreach_add([x], [x], alpha=v)[0],
}


@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("name", VARIED)
def test_numbers_that_vary_do_not_compile(name, kind, compile_count, fallbacks):
    function = VARIED[name]
    values = [2.5, 3.75, -7.25, 1e6, 0.125, 123.0] if kind is float else [2, 3, -7, 10**6, 5, 123]
    x, host = torch.tensor(X, device="xla"), torch.tensor(X)
    for step, value in enumerate(values):
        if step == 1:
            compiled = compile_count()
        result = function(x, value)
        torch_xla.sync()
        # one rounding more or less than the CPU's fused kernels
        torch.testing.assert_close(result.cpu(), function(host, value), rtol=1e-6, atol=1e-6)
    assert compile_count() == compiled
    assert fallbacks() == {}


# No denormal numbers: XLA treats them as zero. No tensors of bools: XLA turns float(b) * c into
# "c where b, else 0", which is another zero, or no nan, for some c.
SPECIAL = [
    0,
    1,
    -1,
    0.0,
    -0.0,
    1.0,
    True,
    False,
    math.nan,
    math.inf,
    -math.inf,
    1e-37,
    2**40,
    -(2**63),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, v: x + v,
        lambda x, v: x * v,
        lambda x, v: v * x,
        lambda x, v: x / v,
        lambda x, v: torch.where(x > 0, x, v),
        lambda x, v: torch.full_like(x, v, dtype=torch.float32),
        lambda x, v: x == v,
        lambda x, v: torch.copysign(x, v),
    ],
    ids=["add", "mul", "rmul", "div", "where", "full", "eq", "copysign"],
)
def test_equal_numbers_of_different_kinds_are_told_apart(function, dtype):
    """1, 1.0 and True are equal and hash alike in Python, as 0.0 and -0.0 are: results differ."""
    host = torch.tensor([1, 0, 3]).to(dtype)
    x = host.to("xla")
    for value in SPECIAL:
        expected = function(host, value)
        found = function(x, value).cpu()
        assert found.dtype == expected.dtype, value
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=repr(value))
        if expected.is_floating_point():
            assert torch.equal(torch.signbit(found), torch.signbit(expected)) or math.isnan(
                value
            ), value


def test_numbers_out_of_range_are_refused_as_on_the_cpu():
    for make in (
        lambda device: torch.ones(2, dtype=torch.int32, device=device) + 2**70,
        lambda device: torch.full((2,), 2**70, device=device),
    ):
        with pytest.raises((RuntimeError, OverflowError)) as expected:
            make("cpu")
        with pytest.raises(expected.type):
            make("xla")


def test_shapes_and_axes_are_no_values(compile_count):
    """A number that says where to look is part of the program, and the right program runs."""
    x = torch.arange(12.0, device="xla").view(3, 4)
    host = x.cpu()
    for dim in (0, 1, -1):
        assert torch.equal(x.sum(dim).cpu(), host.sum(dim))
    for k in (1, 2, 3):
        assert torch.equal(x.topk(k).values.cpu(), host.topk(k).values)
        assert torch.equal(x[k - 1].cpu(), host[k - 1])
        assert torch.equal(x.roll(k).cpu(), host.roll(k))
        assert torch.equal((x**k).cpu(), host**k)


def test_learning_rates_and_loss_scales(compile_count):
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0], device="xla"))
    q = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizers = [torch.optim.Adam([t], lr=0.1, betas=(0.8, 0.9)) for t in (p, q)]
    for step in range(10):
        scale = 1024.0 * (step + 1)
        for t, optimizer in zip((p, q), optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.zero_grad()
            ((t * t).sum() * scale).backward()
            t.grad.div_(scale)
            optimizer.step()
        torch_xla.sync()
        if step == 2:
            compiled = compile_count()
    assert compile_count() == compiled
    # ten float32 updates with the same formula
    torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-6)


def test_a_counter_in_python_does_not_compile(compile_count):
    total = torch.zeros((), device="xla")
    for step in range(2, 12):
        total += step
        torch_xla.sync()
        if step == 4:
            compiled = compile_count()
    assert total.item() == sum(range(2, 12))
    assert compile_count() == compiled
