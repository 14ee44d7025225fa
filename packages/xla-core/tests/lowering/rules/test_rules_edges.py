"""Arithmetic and complex functions at the edges of a dtype's range, against PyTorch's CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import torch_xla  # noqa: F401  (registers the device)

Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]


def parts(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, ones, the largest and the smallest numbers of a real dtype, and their roots."""
    limits = torch.finfo(dtype)
    root, tiny_root = limits.max**0.5, limits.tiny**0.5
    numbers = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 1e-3, limits.max, limits.min, limits.max * 0.75,
               limits.max / 3, limits.tiny, -limits.tiny, limits.tiny * 4, root, -root, tiny_root * 2,
               tiny_root * 3, 10.0]  # fmt: skip
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def edges(dtype: torch.dtype) -> torch.Tensor:
    """``parts`` with as many random numbers; of a complex dtype all pairs of ``parts``."""
    if dtype.is_complex:
        real = parts(dtype.to_real())
        return torch.complex(
            *(part.reshape(-1) for part in torch.meshgrid(real, real, indexing="ij"))
        )
    noise = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.cat([parts(dtype), noise.to(dtype)])


def assert_equal(device: torch.Tensor, cpu: torch.Tensor, *, ulps: float) -> None:
    """Both are equal within ``ulps`` of the larger part; subnormal numbers may be 0."""
    assert device.dtype == cpu.dtype
    limits = torch.finfo(cpu.dtype)
    if cpu.is_complex():
        device, cpu = torch.view_as_real(device), torch.view_as_real(cpu)
    else:
        device, cpu = device[..., None], cpu[..., None]
    device, cpu = device.double(), cpu.double()
    same = (device == cpu) | (device.isnan() & cpu.isnan())
    allowed = cpu.abs().amax(-1, keepdim=True) * ulps * limits.eps + limits.tiny * 2
    close = ((device - cpu).abs() <= allowed) & device.isfinite()
    right = (same | close).all(-1)
    assert right.all(), (device[~right][:5], cpu[~right][:5])


def both(function: Unary, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``function`` makes of ``value`` on the device (brought back), and on the CPU."""
    return function(value.to("xla")).cpu(), function(value)


DIVISIONS: dict[str, Binary] = {
    "div": torch.div,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "in place": lambda a, b: (a + torch.zeros_like(b)).div_(b),
    "addcdiv": lambda a, b: torch.addcdiv(torch.zeros_like(a + b), a, b, value=2.0),
    "expanded": lambda a, b: a.expand(-1, b.shape[1]).clone() / b.expand(a.shape[0], -1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_a_broadcast_divisor_divides_exactly(name: str, dtype: torch.dtype) -> None:
    if name == "floor" and dtype.itemsize < 4:
        pytest.skip("the CPU rounds each step of it to this dtype: it is off by one for some")
    value = edges(dtype)
    device, cpu = both(lambda x: DIVISIONS[name](x[:, None], x[None]), value)
    assert_equal(device, cpu, ulps=0.51 if name != "addcdiv" else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_number_divides_exactly(dtype: torch.dtype) -> None:
    value = edges(dtype)
    for number in (3.0, 0.1, torch.finfo(dtype).max, torch.finfo(dtype).max / 3):
        device, cpu = both(lambda x, number=number: x / number, value)
        assert_equal(device, cpu, ulps=0)


def test_a_number_divided_by_itself_is_one() -> None:
    value = torch.rand(1000, generator=torch.Generator().manual_seed(1)) + 0.01
    device = value.to("xla")
    ratios = torch.div(device[:, None], device[None], rounding_mode="trunc").diagonal()
    assert (ratios.cpu() == 1).all()


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("name", ["div", "in place", "addcdiv"])
def test_complex_division_neither_overflows_nor_loses_small_parts(
    name: str, dtype: torch.dtype
) -> None:
    value = edges(dtype)
    one, other = value[::3], value[1::3]
    cpu = DIVISIONS[name](one[:, None], other[None])
    device = DIVISIONS[name](one.to("xla")[:, None], other.to("xla")[None]).cpu()
    known = cpu.isfinite()  # how an overflow is written depends on the length of the CPU's vectors
    assert known.sum() > 10_000
    assert_equal(device[known], cpu[known], ulps=8)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_quotients_of_small_and_large_numbers_have_their_digits(
    dtype: torch.dtype,
) -> None:
    """A subnormal number counts as 0: no product on the way may be one where the quotient is none."""
    limits = torch.finfo(dtype)
    small = torch.tensor([24 + 31j, -40 + 24j, 27 - 90j, 2 - 8j], dtype=dtype) * limits.tiny
    large = torch.tensor([1 + 0.25j, 0.3 - 1.1j, 1.5 + 0.01j, 1], dtype=dtype)
    for one, other in ((small, large), (large, small), (small, small.flip(0))):
        cpu = one / other
        error = ((one.to("xla") / other.to("xla")).cpu() - cpu).abs() / cpu.abs()
        assert error.max() < 8 * limits.eps


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_constant_complex_divisor_near_the_largest_divides(dtype: torch.dtype) -> None:
    number = torch.finfo(dtype).max * complex(0.75, 0.25)
    device, cpu = both(lambda x: x / number, edges(dtype))
    assert_equal(device, cpu, ulps=8)


@pytest.mark.parametrize("exponent", [0, 0.5, -0.5, -1, 2, -2, 3, 2.5, -3, 0j, 1 + 1j, 0.5 + 0j])
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_powers_are_those_of_the_c_library(dtype: torch.dtype, exponent: complex) -> None:
    device, cpu = both(lambda x: x**exponent, edges(dtype))
    known = cpu.isfinite()
    assert known.sum() > 100
    # the error of a power is that of the logarithm times the exponent
    ulps = 4 * math.log(torch.finfo(dtype).max)
    assert_equal(device[known], cpu[known], ulps=ulps)


def test_powers_of_complex_zero() -> None:
    exponents = torch.tensor([0j, 1 + 1j, 2 + 0j, 0.5 - 3j, -1 + 0j, -2.5 + 1j] * 4)
    for base in (torch.zeros_like(exponents), torch.full_like(exponents, 1e38 - 1e38j)):
        cpu = base**exponents
        assert_equal((base.to("xla") ** exponents.to("xla")).cpu(), cpu, ulps=400)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exponent", [0.5, -0.5, -1, 2, -2, 3, 2.5, -3])
def test_powers_of_floats(dtype: torch.dtype, exponent: float) -> None:
    infinite = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    device, cpu = both(lambda x: x**exponent, torch.cat([edges(dtype), infinite]))
    assert_equal(device, cpu, ulps=16)


FUNCTIONS = ["abs", "acosh", "angle", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "exp2", "expm1",
             "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sgn", "sin", "sinh", "sqrt", "tan",
             "tanh"]  # fmt: skip


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_functions_keep_signs_and_small_parts(name: str, dtype: torch.dtype) -> None:
    value = edges(dtype)
    if name == "acosh":
        value = value[~((value.real.abs() == 1) & (value.imag != 0))]  # its root is subnormal there
    device, cpu = both(getattr(torch, name), value)
    known = cpu.isfinite()
    assert_equal(device[known], cpu[known], ulps=32)


@pytest.mark.parametrize(
    "name",
    ["abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "log", "log10", "log2", "sin",
     "sinh", "sqrt", "tan", "tanh"],
)  # fmt: skip
def test_complex_functions_of_infinities_and_nan(name: str) -> None:
    real = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 2.0, -0.5, 1e4])
    value = torch.complex(*(part.reshape(-1) for part in torch.meshgrid(real, real, indexing="ij")))
    results = both(getattr(torch, name), value)
    device, cpu = (torch.view_as_real(x) if x.is_complex() else x[:, None] for x in results)
    # C99 leaves the sign of an infinite part beside NaN open
    free = (cpu.isinf() & cpu.isnan().any(-1, keepdim=True)) & device.isinf()
    torch.testing.assert_close(
        torch.where(free, device.abs(), device), torch.where(free, cpu.abs(), cpu), equal_nan=True
    )


@pytest.mark.parametrize(
    "name", ["asin", "asinh", "atan", "atanh", "cosh", "expm1", "log1p", "sin", "sinh", "sqrt", "tan", "tanh"]
)  # fmt: skip
def test_complex_functions_keep_the_signs_of_zeros(name: str) -> None:
    parts = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.5])
    value = torch.complex(
        *(part.reshape(-1) for part in torch.meshgrid(parts, parts, indexing="ij"))
    )
    device, cpu = map(torch.view_as_real, both(getattr(torch, name), value))
    zero = (cpu == 0) & (device == 0)
    assert zero.any()
    assert torch.equal(device.signbit()[zero], cpu.signbit()[zero])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_logarithm_of_gamma_has_its_digits_beside_its_zeros(dtype: torch.dtype) -> None:
    near = torch.linspace(-0.3, 0.3, 61, dtype=torch.float64)
    small = 2.0 ** -torch.arange(4.0, 22.0, dtype=torch.float64)
    near = torch.cat([near, small, -small])
    value = torch.cat([1 + near, 2 + near, torch.tensor([0.5, 3.0, 7.0, -0.25])]).to(dtype)
    truth = torch.lgamma(value.double()).to(dtype)  # the C library's, which Python's own is not
    assert_equal(torch.lgamma(value.to("xla")).cpu(), truth, ulps=16)
    assert torch.lgamma(torch.tensor([1.0, 2.0], dtype=dtype).to("xla")).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_logarithm_of_a_normal_probability_is_exact_in_both_tails(dtype: torch.dtype) -> None:
    value = torch.tensor([-100.0, -20, -5, -1.001, -1, -0.999, 0, 1, 3, 5], dtype=dtype)
    device, cpu = both(torch.special.log_ndtr, value)
    assert_equal(device, cpu, ulps=32)


BESSEL = ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_k0", "modified_bessel_k1",
          "scaled_modified_bessel_k0", "scaled_modified_bessel_k1"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BESSEL)
def test_bessel_functions_of_the_smallest_numbers(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch.special, name)
    tiny = torch.finfo(dtype).tiny
    value = torch.tensor([0.0, -0.0, tiny, tiny * 8, 1e-20, 1e-9, 2e-9, 1e-4], dtype=dtype)
    device, cpu = both(function, value)
    known = cpu.isfinite() | (value == 0)
    assert_equal(device[known], cpu[known], ulps=64)
    assert torch.equal(device[:2].signbit(), cpu[:2].signbit())


@pytest.mark.parametrize("name", BESSEL[4:])
def test_modified_bessel_functions_of_the_largest_numbers(name: str) -> None:
    value = torch.tensor([100.0, 1e10, 1e100, 1.7e308, math.inf], dtype=torch.float64)
    device, cpu = both(getattr(torch.special, name), value)
    torch.testing.assert_close(device, cpu, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floor_division_gives_the_quotient_s_zero(dtype: torch.dtype) -> None:
    value = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -math.inf, math.inf], dtype=dtype)
    device, cpu = both(lambda x: torch.floor_divide(x[:, None], x[None]), value)
    assert torch.equal(device.nan_to_num(5), cpu.nan_to_num(5))
    zero = cpu == 0
    assert torch.equal(device.signbit()[zero], cpu.signbit()[zero])
