"""Operators of operands that the CPU refuses for their dtypes, or gives another dtype than usual.

``tools/dtype_report.py`` compares all pairs of dtypes; here is one case of each kind.
"""

from __future__ import annotations

import pytest
import torch

from xla_core.dispatch import cpu_error_parity
from xla_core.testing.against_cpu import assert_agrees_with_cpu, attempt, copy_to
from xla_core.torch_bridge import error_texts

# of halves of complex numbers, and of imaginary parts that are left out
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.complex64,
)  # fmt: skip


def some(dtype, *shape):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + 1).to(dtype)


def check(function, *operands):
    """The same exception when recorded, or results of the same shape and dtype; values are in the report."""
    e = attempt(lambda: function(*copy_to(operands, "cpu")))
    g = attempt(lambda: function(*copy_to(operands, "xla")))
    if e.error is not None and g.error is None and error_texts.is_missing_half_kernel(e.error):
        return  # XLA has what the CPU has for float32 only
    assert type(g.error) is type(e.error), (e.error, g.error)
    if e.error is None:
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (e.value, g.value)), strict=True)
        assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)


REDUCTIONS = {
    "std": lambda x: torch.std(x, 0),
    "var of all": torch.var,
    "median": torch.median,
    "median, dim": lambda x: torch.median(x, 0),
    "nanmedian": lambda x: torch.nanmedian(x, 0),
    "mode": lambda x: torch.mode(x, 0),
    "topk": lambda x: torch.topk(x, 2),
    "kthvalue": lambda x: torch.kthvalue(x, 1),
    "argmax": torch.argmax,
    "max, dim": lambda x: torch.max(x, 0),
    "aminmax": torch.aminmax,
    "cummax": lambda x: torch.cummax(x, 0),
    "cumsum as booleans": lambda x: torch.cumsum(x, 0, dtype=torch.bool),
    "nansum as integers": lambda x: torch.nansum(x, dtype=torch.int32),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "trace": torch.trace,
    "cdist": lambda x: torch.cdist(x, x),
    "mean, out= of halves": lambda x: torch.mean(x, 0, out=torch.zeros(3, dtype=torch.half, device=x.device)),
    "all, out= of booleans": lambda x: torch.all(x, 0, out=torch.zeros(3, dtype=torch.bool, device=x.device)),
    "norm, out= of doubles": lambda x: torch.linalg.vector_norm(
        x, dim=0, out=torch.zeros(3, dtype=torch.double, device=x.device)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_every_dtype(name):
    for dtype in DTYPES:
        check(REDUCTIONS[name], some(dtype, 2, 3))


BINARY = {
    "sub": torch.sub, "pow": torch.pow, "ldexp": torch.ldexp, "remainder": torch.remainder,
    "bitwise_and": torch.bitwise_and, "gcd": torch.gcd, "maximum": torch.maximum, "polar": torch.polar,
    "heaviside": torch.heaviside, "searchsorted": torch.searchsorted,
    "gcd_": lambda a, b: a.gcd_(b), "heaviside_": lambda a, b: a.heaviside_(b), "lt_": lambda a, b: a.lt_(b),
    "floor_divide_": lambda a, b: a.floor_divide_(b), "copy_": lambda a, b: a.copy_(b),
    "add, alpha=True": lambda a, b: torch.add(a, b, alpha=True),
    "gcd, out= of booleans": lambda a, b: torch.gcd(
        a, b, out=torch.zeros(3, dtype=torch.bool, device=a.device)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_pairs_of_dtypes(name):
    for dtype in DTYPES:
        for other in (*(some(d, 3) for d in DTYPES), some(torch.float16), True, 2, 1.5 + 1j):
            check(BINARY[name], some(dtype, 3), other)


@pytest.mark.parametrize("number", [True, 300, -1, 1.5, 1j])
def test_filling_with_a_number_that_the_dtype_does_not_hold(number):
    for dtype in DTYPES:
        check(lambda x: x.fill_(number), some(dtype, 3))


def test_values_of_what_had_another_dtype():
    assert_agrees_with_cpu(lambda x: x**True, some(torch.bool, 3))
    assert_agrees_with_cpu(lambda x: x.copy_(2), some(torch.float32, 3))
    assert_agrees_with_cpu(torch.ldexp, some(torch.bool, 3), some(torch.float16))
    assert_agrees_with_cpu(torch.ldexp, some(torch.float16, 3), some(torch.int64, 3))
    assert_agrees_with_cpu(
        lambda x: torch.remainder(x, x, out=torch.zeros(3, dtype=torch.uint8, device=x.device)),
        some(torch.int64, 3),
    )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["add", "mul", "div", "fmod", "remainder", "hypot", "pow", "lt"])
def test_whole_numbers_beside_halves_are_rounded_first(name, half):
    operator = getattr(torch, name)
    whole = torch.tensor([2049, 257, 70001, 3, -30001, 1], dtype=torch.int32)
    halves = torch.tensor([1, 2.5, -3, 7, 2048, 256], dtype=half)
    for a, b in ((whole, halves), (halves, whole), (whole[0], halves), (halves, whole[0])):
        assert_agrees_with_cpu(operator, a, b)


def test_the_cpu_is_asked_once_for_the_same_dtypes(monkeypatch):
    torch.topk(some(torch.int16, 2, 3).to("xla"), 2)
    calls = []
    attempted = cpu_error_parity._attempt
    monkeypatch.setattr(
        cpu_error_parity, "_attempt", lambda *a: calls.append(a[0]) or attempted(*a)
    )
    torch.topk(some(torch.int16, 4, 3).to("xla"), 2)
    assert not calls
    torch.topk(some(torch.uint8, 4, 3).to("xla"), 2)
    torch.topk(some(torch.uint8, 5, 3).to("xla"), 2)
    assert len(calls) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_the_cpu_has_for_float32_only_is_computed_in_half_precision(dtype):
    x = some(dtype, 4, 3)
    for function in (lambda x: torch.cdist(x, x), torch.special.bessel_j0, torch.pdist):
        with pytest.raises(NotImplementedError):
            function(x)
        got = function(x.to("xla"))
        assert got.dtype is dtype
        torch.testing.assert_close(got.cpu().float(), function(x.float()), rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError, match="gcd"):  # the CPU has that for integers only
        torch.gcd(x.to("xla"), x.to("xla"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.bool])
def test_a_large_tensor_is_viewed_in_another_dtype(dtype):
    cpu_error_parity._taken.clear()
    check(lambda x: x.view(dtype), torch.zeros(3, 4096, dtype=torch.uint8))
    cpu_error_parity._taken.clear()
    check(lambda x: x.view(dtype), torch.zeros(4096, 3, dtype=torch.uint8))


CLAMPS = {
    "clamp_": lambda x, low, high: x.clamp_(low, high),
    "clamp_ below": lambda x, low, high: x.clamp_(min=low),
    "clamp_max_": lambda x, low, high: x.clamp_max_(high),
    "clamp_min_": lambda x, low, high: x.clamp_min_(low),
    "out=": lambda x, low, high: torch.clamp(x.clone(), low, high, out=x),
}


@pytest.mark.parametrize("bounds", [torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("name", CLAMPS)
def test_clamping_in_place_compares_in_the_wider_dtype(name, dtype, bounds):
    """As on the CPU: what does not fit the tensor's dtype is cut off after the comparison."""
    found = []
    for device in ("cpu", "xla"):
        x = torch.tensor([5, 100, 7, 0, 120]).to(dtype).to(device)
        low = torch.tensor([-100, 3, 8, -1, 100]).to(bounds).to(device)
        high = torch.tensor([-2, 300, 90, 1, 110]).to(bounds).to(device)
        CLAMPS[name](x, low, high)
        found.append(x.tolist())
    assert found[0] == found[1]
