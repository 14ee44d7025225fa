"""Element-wise rules against PyTorch's CPU kernels: dtypes, promotion, NaN and infinity."""

from __future__ import annotations

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.lowering.rules.common import present
from xla_core.lowering.rules.comparison import BITWISE, COMPARISONS
from xla_core.lowering.rules.elementwise import FLOAT_FUNCTIONS, ROUNDING_FUNCTIONS
from xla_core.testing.rules import Call, check, check_all

aten = torch.ops.aten

FLOATS = [torch.float32, torch.float64, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.0, 1e-3, float("inf"),
         float("-inf"), float("nan")]  # fmt: skip


def values(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random and edge values of ``dtype``, 28 of them as a 4x7 matrix."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(4, 7, generator=generator) > 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -20
        return torch.randint(low, 20, (4, 7), generator=generator, dtype=dtype)
    edges = torch.tensor(EDGES)
    edges = edges[torch.randperm(len(EDGES), generator=generator)]
    noise = torch.randn(28 - len(EDGES), generator=generator) * 3
    return torch.cat([edges, noise]).reshape(4, 7).to(dtype)


def finite(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """As ``values``, without NaN and infinities."""
    return values(dtype, seed).nan_to_num(0.25, 4.0, -4.0)


# Relative error of these functions near their zeros or poles is that of the argument reduction.
LOOSE = {
    "lgamma": (1e-4, 1e-5),
    "digamma": (1e-4, 1e-4),
    "special_ndtri": (1e-4, 1e-5),
    "erfinv": (1e-4, 1e-5),
    "sinc": (1e-4, 1e-5),
}
# The CPU has no kernel for these: there is nothing to compare with.
NO_CPU_KERNEL = {
    torch.float32: set(),
    torch.int32: {"frac"},
    torch.bfloat16: {
        "special_log_ndtr",
        "special_modified_bessel_i0",
        "special_modified_bessel_i1",
        "special_ndtri",
    },
    torch.bool: {"abs", "neg", "relu"},
    torch.complex64: {"sign", "signbit"},
}
UNARY = {**FLOAT_FUNCTIONS, **ROUNDING_FUNCTIONS}


@pytest.mark.parametrize("name", sorted(name for name in UNARY if present(name)))
def test_unary(name: str) -> None:
    (overload,) = present(name)
    calls = []
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        if name in NO_CPU_KERNEL[dtype]:
            continue
        tolerance = LOOSE.get(name) if dtype != torch.bfloat16 else None
        value = finite(dtype) if name == "lgamma" else values(dtype)
        calls.append(Call(overload, value, tolerance=tolerance))
    check_all(calls)


@pytest.mark.parametrize(
    "name", ["abs", "neg", "sign", "sgn", "sqrt", "exp", "sin", "tanh", "sigmoid", "log",
             "reciprocal", "isnan", "isinf", "logical_not", "nan_to_num", "signbit", "angle"]
)  # fmt: skip
def test_unary_of_other_dtypes(name: str) -> None:
    (overload,) = present(name)
    whole = torch.complex(finite(torch.float32), finite(torch.float32, 1))
    operands = [values(dtype) for dtype in (torch.float64, torch.bool, torch.uint8)]
    check_all(
        [
            Call(overload, value)
            for value in (*operands, whole)
            if name not in NO_CPU_KERNEL.get(value.dtype, ())
        ]
    )


@pytest.mark.parametrize("name", ["abs", "sign", "isnan", "isinf", "isposinf", "isneginf",
                                  "logical_not", "signbit", "nan_to_num", "relu"])  # fmt: skip
def test_simple_unary(name: str) -> None:
    (overload,) = present(name)
    dtypes = [d for d in (*FLOATS, torch.int32, torch.bool) if name not in NO_CPU_KERNEL.get(d, ())]
    check_all([Call(overload, values(dtype)) for dtype in dtypes])


PROMOTING = [*FLOATS, *INTEGERS]


@pytest.mark.parametrize("left", PROMOTING)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "rsub", "maximum"])
def test_arithmetic_promotion(name: str, left: torch.dtype) -> None:
    overload = present(name if name == "maximum" else f"{name}.Tensor")[0]
    right = [values(dtype, 1) for dtype in PROMOTING]
    check_all([Call(overload, values(left), other) for other in right])
    check_all([Call(overload, values(left), other[0, 0]) for other in right])


SCALARS = [2, 2.5, -3, 0, 1.0]


@pytest.mark.parametrize("dtype", PROMOTING)
@pytest.mark.parametrize(
    "name", ["add.Scalar", "add.Tensor", "sub.Scalar", "mul.Scalar", "mul.Tensor", "rsub.Scalar"]
)
def test_arithmetic_with_scalars(name: str, dtype: torch.dtype) -> None:
    (overload,) = present(name)
    check_all([Call(overload, values(dtype), scalar) for scalar in SCALARS])


@pytest.mark.parametrize("dtype", PROMOTING)
@pytest.mark.parametrize(
    "name", ["div.Tensor", "remainder.Scalar", "fmod.Scalar", "floor_divide.Scalar"]
)
def test_division_by_scalars(name: str, dtype: torch.dtype) -> None:
    (overload,) = present(name)
    check_all([Call(overload, values(dtype), scalar) for scalar in SCALARS if scalar != 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_alpha(dtype: torch.dtype) -> None:
    alpha = 3 if dtype == torch.int64 else 0.3
    for name in ("add.Tensor", "sub.Tensor", "rsub.Tensor"):
        check(present(name)[0], finite(dtype), finite(dtype, 1), alpha=alpha)
    for name in ("add.Scalar", "sub.Scalar", "rsub.Scalar"):
        check(present(name)[0], finite(dtype), 2, alpha)


def test_bool_arithmetic() -> None:
    left, right = values(torch.bool), values(torch.bool, 1)
    check_all(
        [
            Call(aten.add.Tensor, left, right),
            Call(aten.mul.Tensor, left, right),
            Call(aten.add.Tensor, left, 1),
            Call(aten.div.Tensor, left, values(torch.int32, 1).abs() + 1),
        ]
    )


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]
)
def test_division_modes(dtype: torch.dtype, mode: str | None) -> None:
    divisor = torch.where(values(dtype, 1) == 0, torch.ones((), dtype=dtype), values(dtype, 1))
    check_all(
        [
            Call(aten.div.Tensor_mode, values(dtype), divisor, rounding_mode=mode),
            Call(aten.div.Scalar_mode, values(dtype), 3, rounding_mode=mode),
            Call(aten.remainder.Tensor, values(dtype), divisor),
            Call(aten.fmod.Tensor, values(dtype), divisor),
        ]
    )


def test_float_division_by_zero() -> None:
    zero = torch.tensor([0.0, -0.0, 0.0])
    top = torch.tensor([1.0, 1.0, 0.0])
    for mode in (None, "trunc", "floor"):
        check(aten.div.Tensor_mode, top, zero, rounding_mode=mode)
    check(
        aten.div.Tensor_mode,
        torch.tensor([1.0, -1.0]),
        torch.tensor([0.1, 0.1]),
        rounding_mode="floor",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_pow_by_a_constant(dtype: torch.dtype) -> None:
    exponents = [0, 1, 2, 3, 5, 0.5, -0.5, 1.7, 2.0]
    # PyTorch refuses integers to negative integer powers.
    exponents += [-1, -2] if dtype.is_floating_point else []
    # XLA's pow has a larger error than libm's for large powers.
    tolerance = (1e-4, 1e-5) if dtype != torch.bfloat16 else None
    overload = aten.pow.Tensor_Scalar
    check_all([Call(overload, values(dtype), e, tolerance=tolerance) for e in exponents])


def test_pow_of_large_whole_exponents() -> None:
    """Exponents of more than 6 bits: the product wraps around as the CPU's."""
    calls = []
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        base = torch.tensor([3, 2, 7, 100, 5, 1, 0]).to(dtype)
        exponent = torch.tensor([100, 64, 127, 3, 99, 126, 0]).to(dtype)
        calls.append(Call(aten.pow.Tensor_Tensor, base, exponent))
        calls.append(Call(aten.pow.Tensor_Scalar, base, 101))
    check_all(calls)


def test_divisors_of_the_smallest_number() -> None:
    """It has no absolute value: such a loop has to end."""
    calls = []
    for dtype in (torch.int64, torch.int32, torch.int8):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        left = torch.tensor([low, high, 0, 6, -4, low, 0, 12], dtype=dtype)
        right = torch.tensor([3, high, 0, low, 6, low, low, 8], dtype=dtype)
        calls += [Call(aten.gcd.default, left, right), Call(aten.lcm.default, left[3:5], left[4:6])]
        calls.append(
            Call(aten.lcm.default, torch.tensor([0, 4, -6], dtype=dtype), right[[2, 4, 7]])
        )
    check_all(calls)


def test_pow_of_tensors() -> None:
    check_all(
        [
            Call(
                aten.pow.Tensor_Tensor,
                values(torch.float32),
                values(torch.float32, 1),
                tolerance=(1e-4, 0),
            ),
            Call(
                aten.pow.Tensor_Tensor,
                torch.tensor([2, 3, -1, -1, 1, 5]),
                torch.tensor([10, 0, -3, -2, -1, -2]),
            ),
            Call(aten.pow.Scalar, 2, values(torch.float32), tolerance=(1e-4, 0)),
            Call(aten.pow.Scalar, 2.5, torch.arange(5), tolerance=(1e-4, 0)),
        ]
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", sorted(COMPARISONS))
def test_comparisons(name: str, dtype: torch.dtype) -> None:
    tensor, scalar = present(f"{name}.Tensor", f"{name}.Scalar")
    check_all(
        [
            Call(tensor, values(dtype), values(dtype, 1)),
            Call(tensor, values(dtype), values(torch.float32, 1)),
            Call(scalar, values(dtype), 0.5),
            Call(scalar, values(dtype), 1),
        ]
    )


def test_a_compared_scalar_is_rounded_to_the_dtype_first() -> None:
    check(aten.eq.Scalar, torch.tensor([0.1], dtype=torch.bfloat16), 0.1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", sorted([*BITWISE, "bitwise_right_shift"]))
def test_bitwise(name: str, dtype: torch.dtype) -> None:
    amount = values(dtype, 1).abs() % 7 if "shift" in name else values(dtype, 1)
    check_all(
        [
            Call(present(f"{name}.Tensor")[0], values(dtype), amount),
            Call(aten.bitwise_not.default, values(dtype)),
        ]
    )


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bitwise_of_bool(name: str) -> None:
    check_all(
        [
            Call(present(f"{name}.Tensor")[0], values(torch.bool), values(torch.bool, 1)),
            Call(aten.bitwise_not.default, values(torch.bool)),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logical(name: str, dtype: torch.dtype) -> None:
    check(present(name)[0], values(dtype), values(torch.int64, 1))


@pytest.mark.parametrize("name", ["fmax", "fmin", "maximum", "minimum", "atan2", "copysign.Tensor",
                                  "hypot", "logaddexp", "logaddexp2", "xlogy.Tensor",
                                  "heaviside", "special_xlog1py"])  # fmt: skip
def test_binary_functions(name: str) -> None:
    (overload,) = present(name)
    # The CPU's bfloat16 kernel of logaddexp rounds in between, in an order of its own.
    dtypes = FLOATS[:2] if name.startswith("logaddexp") else FLOATS
    check_all([Call(overload, values(dtype), values(dtype, 1)) for dtype in dtypes])
    check_all([Call(overload, values(dtype)[0], values(dtype, 1)) for dtype in dtypes])


def test_log_sums_of_complex_numbers_neither_wrap_nor_overflow() -> None:
    parts = torch.linspace(-7, 9, 12), torch.linspace(-8, 6, 12)
    left, right = torch.complex(parts[0], parts[1]), torch.complex(parts[1].flip(0), parts[0])
    far = torch.tensor([200 + 4j, -300 - 5j, complex("-inf+1j"), complex("inf")])
    check_all(
        [
            Call(aten.logaddexp.default, left, right),
            Call(aten.logaddexp.default, left * 40, right),
            Call(aten.logaddexp.default, far, far.flip(0)),
            Call(aten.logaddexp.default, far, far),
        ]
    )


def test_more_binary_functions() -> None:
    whole = values(torch.int64), values(torch.int64, 1)
    check_all(
        [
            Call(aten.gcd.default, *whole),
            Call(aten.lcm.default, *whole),
            Call(
                aten.nextafter.default,
                values(torch.float32),
                values(torch.float32, 1),
                tolerance=(0, 0),
            ),
        ]
    )
    positive = finite(torch.float32).abs() + 0.1
    # the incomplete gamma functions are series of different length
    check_all(
        [
            Call(
                aten.igamma.default,
                positive,
                finite(torch.float32, 1).abs(),
                tolerance=(1e-4, 1e-5),
            ),
            Call(
                aten.igammac.default,
                positive,
                finite(torch.float32, 1).abs(),
                tolerance=(1e-4, 1e-5),
            ),
            Call(aten.copysign.Scalar, values(torch.float32), -1.5),
            Call(aten.xlogy.Scalar_Other, values(torch.float32), 2.0),
            Call(aten.special_zeta.default, positive + 1, positive, tolerance=(1e-4, 1e-5)),
            Call(aten.polygamma.default, 1, positive, tolerance=(1e-4, 1e-5)),
        ]
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_clamp(dtype: torch.dtype) -> None:
    value, low, high = (
        values(dtype),
        values(dtype, 1),
        values(dtype, 2),
    )
    calls = [
        Call(aten.clamp.default, value, -1, 2),
        Call(aten.clamp.default, value, None, 2),
        Call(aten.clamp.default, value, 0.5, None),
        Call(aten.clamp.Tensor, value, low, high),
        Call(aten.clamp.Tensor, value, None, high),
        Call(aten.clamp_min.default, value, 0.25),
        Call(aten.clamp_min.Tensor, value, low),
        Call(aten.clamp_max.default, value, 1),
        Call(aten.clamp_max.Tensor, value, high),
    ]
    check_all(calls)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lerp_addcmul_addcdiv(dtype: torch.dtype) -> None:
    first, second, third = (finite(dtype, seed) for seed in range(3))
    check_all(
        [
            Call(aten.lerp.Scalar, first, second, 0.3),
            Call(aten.lerp.Scalar, first, second, 0.8),
            Call(aten.lerp.Tensor, first, second, third),
            Call(aten.addcmul.default, first, second, third, value=0.7),
            Call(aten.addcmul.default, first, second, third),
            Call(aten.addcdiv.default, first, second, third.abs() + 1, value=0.7),
        ]
    )


def test_where_and_masked_fill() -> None:
    mask = values(torch.bool)
    check_all(
        [
            Call(aten.where.self, mask, values(torch.float32), values(torch.int64)),
            Call(aten.where.self, mask, values(torch.bfloat16), torch.tensor(2.0)),
            Call(aten.where.self, mask[0], values(torch.float32), values(torch.float64)[:, :1]),
            Call(aten.masked_fill.Scalar, values(torch.float32), mask, float("-inf")),
            Call(aten.masked_fill.Scalar, values(torch.int64), mask[0], 3),
            Call(aten.masked_fill.Tensor, values(torch.bfloat16), mask, torch.tensor(0.3)),
        ]
    )


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_casts(source: torch.dtype) -> None:
    value = finite(source) if source.is_floating_point else values(source)
    targets = [*FLOATS, *INTEGERS, torch.bool]
    check_all([Call(aten._to_copy.default, value, dtype=t) for t in (*targets, torch.complex64)])
    check_all([Call(aten.copy.default, torch.zeros(2, 4, 7, dtype=t), value) for t in targets])


def test_casts_of_complex_and_nan() -> None:
    check(aten._to_copy.default, values(torch.float32), dtype=torch.bool)
    whole = torch.complex(finite(torch.float32), finite(torch.float32, 1))
    check_all(
        [
            Call(aten.conj_physical.default, whole),
            Call(aten._conj_physical.default, whole),
            Call(aten.complex.default, finite(torch.float32), finite(torch.float32, 1)),
            Call(aten.polar.default, finite(torch.float32), finite(torch.float32, 1)),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_fill_and_clone(dtype: torch.dtype) -> None:
    check_all(
        [
            Call(aten.fill.Scalar, values(dtype), 3),
            Call(aten.fill.Tensor, values(dtype), torch.tensor(2)),
            Call(aten.clone.default, values(dtype)),
            Call(aten.zero.default, values(dtype)),
        ]
    )


@pytest.mark.parametrize("decimals", [0, 2, -1])
def test_round_decimals(decimals: int) -> None:
    check(aten.round.decimals, values(torch.float32) * 12.345, decimals=decimals)


def test_logit_and_nan_to_num() -> None:
    inside = torch.rand(20)
    check_all(
        [
            Call(aten.logit.default, inside),
            Call(aten.logit.default, inside, 0.1),
            Call(aten.nan_to_num.default, values(torch.bfloat16), 1.0, 2.0, None),
            Call(aten.isclose.default, values(torch.float32), values(torch.float32) + 1e-7),
        ]
    )
