"""Compares operators on ``xla`` with the CPU for every pair of dtypes, and lists where they differ.

``python tools/dtype_report.py`` runs every binary operator on tensors, tensors without dimensions and
Python numbers of all dtypes, in place and with ``out=`` of all dtypes, and every reduction of each dtype,
with ``dtype=`` and ``out=`` of all. Compared are the exception's type, which ``xla`` must raise when the
operator is called, and the result's dtype, shape and values. ``--only add;histc`` takes some operators.
``--edges`` compares the values that go wrong most easily instead, of unary and binary operators: zeros of
both signs, the ends of each dtype's range, numbers far apart, infinities and NaN, binary ones of each with
each. Of unary operators the signs of zeros are compared, too, and complex numbers with such parts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

import torch_xla
from xla_core.testing.against_cpu import (
    Outcome,
    assert_as_accurate,
    attempt,
    copy_to,
    forget_pending,
)

DTYPES: Final = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
)  # fmt: skip
NUMBERS: Final = (True, 2, 300, -1, 1.5, 1.5 + 1j)
# Cases that are compiled together.
TOGETHER: Final = 150

BINARY: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(torch, name)
    for name in (
        "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "float_power", "rsub",
        "atan2", "hypot", "logaddexp", "logaddexp2", "maximum", "minimum", "fmax", "fmin", "copysign",
        "nextafter", "gcd", "lcm", "ldexp", "xlogy", "heaviside", "bitwise_and", "bitwise_or", "bitwise_xor",
        "bitwise_left_shift", "bitwise_right_shift", "logical_and", "logical_or", "logical_xor",
        "eq", "ne", "lt", "le", "gt", "ge", "isclose", "polar", "complex", "dot", "outer", "dist",
    )
} | {
    "div, floor": partial(torch.div, rounding_mode="floor"),
    "div, trunc": partial(torch.div, rounding_mode="trunc"),
    "add, alpha=2": partial(torch.add, alpha=2),
    "add, alpha=1.5": partial(torch.add, alpha=1.5),
    "add, alpha=True": partial(torch.add, alpha=True),
    "sub, alpha=1.5": partial(torch.sub, alpha=1.5),
    "special.xlog1py": torch.special.xlog1py,
    "special.zeta": torch.special.zeta,
    "where": lambda a, b: torch.where(torch.tensor([True, False, True], device=_device(a, b)), a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "masked_fill": lambda a, b: torch.masked_fill(
        a, torch.tensor([True, False, True], device=a.device), b
    ),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "searchsorted": lambda a, b: torch.searchsorted(a, b),
    "isin": torch.isin,
}  # fmt: skip
OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "a + b": lambda a, b: a + b, "a - b": lambda a, b: a - b, "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b, "a // b": lambda a, b: a // b, "a % b": lambda a, b: a % b,
    "a ** b": lambda a, b: a**b, "a & b": lambda a, b: a & b, "a | b": lambda a, b: a | b,
    "a ^ b": lambda a, b: a ^ b, "a << b": lambda a, b: a << b, "a >> b": lambda a, b: a >> b,
    "a < b": lambda a, b: a < b, "a == b": lambda a, b: a == b,
}  # fmt: skip
IN_PLACE: Final = (
    "add_", "sub_", "mul_", "div_", "floor_divide_", "remainder_", "fmod_", "pow_", "float_power_", "atan2_",
    "hypot_", "copysign_", "nextafter_", "gcd_", "lcm_", "ldexp_", "xlogy_", "heaviside_", "bitwise_and_",
    "bitwise_or_", "bitwise_xor_", "bitwise_left_shift_", "bitwise_right_shift_", "logical_and_", "logical_or_",
    "logical_xor_", "eq_", "ne_", "lt_", "le_", "gt_", "ge_", "copy_", "fill_", "clamp_min_", "clamp_max_",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
)  # fmt: skip
WITH_OUT: Final = (
    "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "float_power", "atan2", "hypot",
    "logaddexp", "maximum", "fmin", "copysign", "gcd", "xlogy", "bitwise_and", "bitwise_left_shift",
    "logical_and", "eq", "lt", "heaviside", "ldexp",
)  # fmt: skip

UNARY: Final[dict[str, Callable[..., Any]]] = (
    {
        name: getattr(torch, name)
        for name in (
            "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil",
            "conj_physical", "cos", "cosh", "deg2rad", "digamma", "erf", "erfc", "erfinv", "exp", "exp2",
            "expm1", "floor", "frac", "i0", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal",
            "lgamma", "log", "log10", "log1p", "log2", "logical_not", "logit", "nan_to_num", "neg", "positive",
            "rad2deg", "reciprocal", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc",
            "sinh", "sqrt", "square", "tan", "tanh", "trunc", "frexp", "celu", "selu",
        )
    }
    | {
        f"special.{name}": getattr(torch.special, name)
        for name in (
            "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "entr", "erfcx", "i0e", "i1", "i1e",
            "log_ndtr", "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1",
            "ndtr", "ndtri", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0",
        )
    }
    | {
        f"nn.functional.{name}": getattr(torch.nn.functional, name)
        for name in (
            "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
            "relu", "relu6", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
        )
    }
    | {
        "polygamma, 1": lambda x: torch.polygamma(1, x),
        "mvlgamma, 2": lambda x: torch.mvlgamma(x, 2),
        "nn.functional.gelu, tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "nn.functional.threshold": lambda x: torch.nn.functional.threshold(x, 0.5, 2.0),
    }
)  # fmt: skip
REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(torch, name)
    for name in (
        "sum", "prod", "mean", "std", "var", "std_mean", "var_mean", "amax", "amin", "max", "min", "argmax",
        "argmin", "median", "nanmedian", "mode", "sort", "msort", "argsort", "all", "any", "nansum", "nanmean",
        "norm", "count_nonzero", "aminmax", "histc", "bincount", "unique", "unique_consecutive", "cov",
        "corrcoef", "diff", "nonzero", "trapezoid", "cumulative_trapezoid", "vander", "std_mean", "logdet",
        "trace", "det", "inverse", "frexp", "signbit", "isneginf", "isposinf", "isreal", "angle", "conj_physical",
        "triu", "tril", "diag", "flip", "histogram",
    )
    if hasattr(torch, name)
} | {
    "sum, 0": lambda x, **k: torch.sum(x, 0, **k),
    "prod, 0": lambda x, **k: torch.prod(x, 0, **k),
    "mean, 0": lambda x, **k: torch.mean(x, 0, **k),
    "nansum, 0": lambda x, **k: torch.nansum(x, 0, **k),
    "std, 0": lambda x, **k: torch.std(x, 0, **k),
    "var, 0": lambda x, **k: torch.var(x, 0, **k),
    "amax, 0": lambda x, **k: torch.amax(x, 0, **k),
    "amin, 0": lambda x, **k: torch.amin(x, 0, **k),
    "all, 0": lambda x, **k: torch.all(x, 0, **k),
    "any, 0": lambda x, **k: torch.any(x, 0, **k),
    "argmax, 0": lambda x, **k: torch.argmax(x, 0, **k),
    "max, 0": lambda x: torch.max(x, 0),
    "min, 0": lambda x: torch.min(x, 0),
    "median, 0": lambda x: torch.median(x, 0),
    "nanmedian, 0": lambda x: torch.nanmedian(x, 0),
    "mode, 0": lambda x: torch.mode(x, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 1),
    "topk": lambda x: torch.topk(x, 2),
    "logsumexp": lambda x, **k: torch.logsumexp(x, 0, **k),
    "cumsum": lambda x, **k: torch.cumsum(x, 0, **k),
    "cumprod": lambda x, **k: torch.cumprod(x, 0, **k),
    "cummax": lambda x: torch.cummax(x, 0),
    "cummin": lambda x: torch.cummin(x, 0),
    "logcumsumexp": lambda x, **k: torch.logcumsumexp(x, 0, **k),
    "softmax": lambda x, **k: torch.softmax(x, 0, **k),
    "log_softmax": lambda x, **k: torch.log_softmax(x, 0, **k),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "nanquantile": lambda x: torch.nanquantile(x, 0.5),
    "vector_norm": lambda x, **k: torch.linalg.vector_norm(x, **k),
    "vector_norm, 0": lambda x, **k: torch.linalg.vector_norm(x, 0, **k),
    "vector_norm, inf": lambda x, **k: torch.linalg.vector_norm(x, float("inf"), **k),
    "matrix_norm": lambda x, **k: torch.linalg.matrix_norm(x, **k),
    "norm, 1": lambda x, **k: torch.norm(x, 1, 0, **k),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "cdist": lambda x: torch.cdist(x, x),
    "mm": lambda x: torch.mm(x, x),
    "std, correction=0": lambda x: torch.std(x, correction=0),
    "histc, 4": lambda x: torch.histc(x, 4, 0, 3),
}  # fmt: skip
WITH_DTYPE: Final = (
    "sum", "prod", "mean", "nansum", "sum, 0", "prod, 0", "mean, 0", "nansum, 0", "cumsum", "cumprod", "softmax",
    "log_softmax", "vector_norm", "vector_norm, inf", "matrix_norm", "norm, 1",
)  # fmt: skip
REDUCING_OUT: Final = (
    "sum, 0", "prod, 0", "mean, 0", "nansum, 0", "std, 0", "var, 0", "amax, 0", "amin, 0", "all, 0", "any, 0",
    "argmax, 0", "logsumexp", "cumsum", "cumprod", "logcumsumexp", "vector_norm", "norm, 1",
)  # fmt: skip

# Values at which an operator may go wrong: of whole numbers beside the ends of their range.
WHOLE: Final = (0, 1, -1, 2, -2, 3, -3, 5, 7, 100)
REAL: Final = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.5, 3.0, 7.25, 100.0, 1e-3, 6e4,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
COMPLEX: Final = (0j, 1 + 0j, -1 + 0j, 1j, 0.5 - 2j, -3 + 4j, 100 + 0.25j)
EDGE_NUMBERS: Final = (True, 300, -1, 0.5, 1.5 + 1j)
# The operators whose second operand must not be 0, as PyTorch on the CPU raises then, ...
DIVIDING: Final = (
    "floor_divide", "remainder", "fmod", "div, floor", "div, trunc", "a // b", "a % b", "floor_divide_",
    "remainder_", "fmod_",
)  # fmt: skip
# ... and those that turn numbers into another dtype, which is defined only inside of its range.
CONVERTING: Final = ("copy_",)

# The operators that need operands of one length, or sorted ones, or are no arithmetic of elements.
ONE_LENGTH: Final = ("where", "masked_fill", "searchsorted", "dot", "outer", "dist", "cat", "isin")

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def _device(*operands: Any) -> Any:
    return next(x.device for x in operands if isinstance(x, torch.Tensor))


def tensor(dtype: torch.dtype, shape: tuple[int, ...] = (3,), shift: int = 0) -> torch.Tensor:
    """Small positive numbers of ``dtype``, without ties in a row."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool and shift:
        return torch.ones(shape, dtype=dtype)  # a number to divide by
    values = (torch.arange(count) * 2 + shift) % 5 + 1
    return (values > 2).reshape(shape) if dtype is torch.bool else values.to(dtype).reshape(shape)


def _said(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype)[6:]}{list(x.shape)}"
    return repr(x)


def pairs() -> Iterator[tuple[Any, Any]]:
    """Operands of binary operators: tensors with and without dimensions, numbers on either side."""
    for a, b in itertools.product(DTYPES, DTYPES):
        yield tensor(a), tensor(b, shift=1)
        yield tensor(a), tensor(b, (), shift=1)
        yield tensor(a, ()), tensor(b, shift=1)
    for a, number in itertools.product(DTYPES, NUMBERS):
        yield tensor(a), number
        yield number, tensor(a, shift=1)
        yield tensor(a, ()), number


def edges(dtype: torch.dtype, name: str) -> torch.Tensor:
    """The values at which operator ``name`` may go wrong, that ``dtype`` has."""
    values: list[float]
    if dtype is torch.bool:
        values = [False, True]
    elif dtype.is_complex:
        return torch.tensor(COMPLEX, dtype=dtype)
    elif dtype.is_floating_point:
        finfo = torch.finfo(dtype)
        values = [*REAL, finfo.max, finfo.min]
        if name in CONVERTING:
            values = [v for v in REAL if abs(v) <= 100]
    else:
        info = torch.iinfo(dtype)
        # The smallest number divided by -1 ends a process on the CPU.
        ends = (info.max,) if name in DIVIDING else (info.min, info.max)
        values = sorted({v for v in WHOLE if info.min <= v <= info.max} | set(ends))
    return torch.tensor(values, dtype=dtype)


def edge_pairs(name: str) -> Iterator[tuple[Any, Any]]:
    """Operands that hold each edge with each: two tensors, a tensor beside one without dimensions or a number."""
    for one, other in itertools.product(DTYPES, DTYPES):
        a, b = edges(one, name), edges(other, name)
        if one.is_complex or other.is_complex:  # what infinite complex numbers give is not defined
            a, b = a[a.isfinite()], b[b.isfinite()]
        if name in DIVIDING:
            b = b[b != 0]
        yield a.repeat_interleave(len(b)), b.repeat(len(a))
        yield a, b[-1].clone()
    for one, number in itertools.product(DTYPES, EDGE_NUMBERS):
        a = edges(one, name)
        if one.is_complex or isinstance(number, complex):
            a = a[a.isfinite()]
        yield a, number
        yield number, a[a != 0] if name in DIVIDING else a


def unary_edges(dtype: torch.dtype) -> torch.Tensor:
    """``edges``; of a complex dtype all pairs of parts, with infinite ones and NaN."""
    if not dtype.is_complex:
        return edges(dtype, "")
    real = edges(dtype.to_real(), "")
    return torch.complex(*(part.reshape(-1) for part in torch.meshgrid(real, real, indexing="ij")))


def _with_signs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with another result for each: the signs of its zeros, as numbers (of what rounds to 0, too)."""

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        results = function(x)
        found = list(results) if isinstance(results, (list, tuple)) else [results]
        for result in list(found):
            parts = torch.view_as_real(result) if result.is_complex() else result
            if parts.is_floating_point():
                sign = torch.copysign(torch.ones_like(parts), parts)
                zero = parts.abs() < torch.finfo(parts.dtype).tiny  # XLA has no subnormal numbers
                found.append(torch.where(zero, sign, torch.zeros_like(parts)))
        return found

    return both


def unary_edge_cases(name: str) -> Iterator[Case]:
    """One function of one tensor, on the edges of each dtype."""
    for dtype in DTYPES:
        x = unary_edges(dtype)
        yield f"{name}: {_said(x)}", _with_signs(UNARY[name]), (x,)


def edge_cases(name: str) -> Iterator[Case]:
    """One operator, as a function, on all pairs of edges."""
    function = BINARY.get(name) or OPERATORS.get(name) or getattr(torch.Tensor, name)
    for a, b in edge_pairs(name):
        if isinstance(a, torch.Tensor) or name in BINARY or name in OPERATORS:
            values = " ".join(_value(x) for x in (a, b))
            yield f"{name}: {_said(a)}, {_said(b)}{values}", function, (a, b)


def _value(x: Any) -> str:
    return f" ({x.item()})" if isinstance(x, torch.Tensor) and x.dim() == 0 else ""


def binary_cases(name: str) -> Iterator[Case]:
    """One operator, as a function, on all pairs."""
    function = BINARY.get(name) or OPERATORS[name]
    for a, b in pairs():
        yield f"{name}: {_said(a)}, {_said(b)}", function, (a, b)


def in_place_cases(name: str) -> Iterator[Case]:
    """One method that writes, on all pairs that begin with a tensor."""

    def written(a: torch.Tensor, b: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(a, name)(b)
        assert result is a
        return a

    for a, b in pairs():
        if isinstance(a, torch.Tensor):
            yield f"{name}: {_said(a)}, {_said(b)}", written, (a, b)


def out_cases(name: str) -> Iterator[Case]:
    """One binary operator with ``out=`` of each dtype; of the pairs some, so that each dtype comes to each."""
    function = BINARY[name]
    for a, out in itertools.product(DTYPES, DTYPES):
        for b in (a, torch.float32, torch.int64):
            operands = tensor(a), tensor(b, shift=1), torch.zeros(3, dtype=out)
            label = f"{name}: {_said(operands[0])}, {_said(operands[1])}, out={_said(operands[2])}"
            yield label, lambda a, b, out: function(a, b, out=out), operands


def reduction_cases(name: str) -> Iterator[Case]:
    """One reduction of each dtype, with ``dtype=`` and ``out=`` of each."""
    function = REDUCTIONS[name]
    for a in DTYPES:
        for shape in ((2, 3), (4,), ()):
            yield f"{name}: {_said(tensor(a, shape))}", function, (tensor(a, shape),)
    for a, b in itertools.product(DTYPES, DTYPES):
        if name in WITH_DTYPE:
            yield (
                f"{name}: {_said(tensor(a, (2, 3)))}, dtype={b}",
                partial(function, dtype=b),
                (tensor(a, (2, 3)),),
            )
        if name in REDUCING_OUT:
            yield (
                f"{name}: {_said(tensor(a, (2, 3)))}, out={b}",
                lambda x, out: function(x, out=out),
                (tensor(a, (2, 3)), torch.zeros(0, dtype=b)),
            )


def groups() -> dict[str, Callable[[], Iterator[Case]]]:
    """All cases, by operator."""
    found: dict[str, Callable[[], Iterator[Case]]] = {}
    for name in (*BINARY, *OPERATORS):
        found[name] = partial(binary_cases, name)
    for name in IN_PLACE:
        found[name] = partial(in_place_cases, name)
    for name in WITH_OUT:
        found[f"{name}, out="] = partial(out_cases, name)
    for name in REDUCTIONS:
        found[f"reduced: {name}"] = partial(reduction_cases, name)
    return found


def edge_groups() -> dict[str, Callable[[], Iterator[Case]]]:
    """Edges of every unary operator, and of every binary one that takes any length, by operator."""
    names = [n for n in BINARY if n not in ONE_LENGTH]
    found: dict[str, Callable[[], Iterator[Case]]] = {}
    for name in UNARY:
        found[name] = partial(unary_edge_cases, name)
    for name in (*names, "a // b", "a % b", "a ** b", "copy_"):
        found[name] = partial(edge_cases, name)
    return found


def compared_when_called(function: Any, operands: Any) -> tuple[Outcome, Outcome, str]:
    """What the CPU and ``xla`` give, and how they differ before anything has run."""
    e = attempt(lambda: function(*copy_to(operands, "cpu")))
    g = attempt(lambda: function(*copy_to(operands, "xla")))
    if (e.error is None) != (g.error is None):
        return e, g, f"CPU {_brief(e)}, xla {_brief(g)}"
    if e.error is not None and type(e.error) is not type(g.error):
        return e, g, f"CPU {e.error!r:.150}, xla {g.error!r:.150}"
    return e, g, ""


def _brief(outcome: Outcome) -> str:
    if outcome.error is not None:
        return repr(outcome.error)[:150]
    results = outcome.value if isinstance(outcome.value, (tuple, list)) else [outcome.value]
    return "gives " + " ".join(map(_said, results))


def _widened(function: Any, operands: Any) -> Any:
    """What the CPU gives for the operands in float64 and complex128, of which all values are what they were."""

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        wide = {torch.complex64: torch.complex128} | dict.fromkeys(
            (torch.float16, torch.bfloat16, torch.float32), torch.float64
        )
        return x.to(wide.get(x.dtype, x.dtype))

    return function(*map(one, operands))


def differences(cases: Iterator[Case], values: bool = True) -> Iterator[str]:
    """A line for every case in which ``xla`` differs."""
    for batch in iter(lambda: list(itertools.islice(cases, TOGETHER)), []):
        waiting = []
        for label, function, operands in batch:
            e, g, difference = compared_when_called(function, operands)
            if difference:
                yield f"{label}: {difference}"
            elif e.error is None:
                waiting.append((label, e.value, g.value, partial(_widened, function, operands)))
        if not values:
            forget_pending()
            for label, e, g, _ in waiting:
                if _metas(e) != _metas(g):
                    yield f"{label}: CPU {_metas(e)}, xla {_metas(g)}"
            continue
        torch_xla.sync()
        for label, e, g, reference in waiting:
            outcome = attempt(partial(assert_as_accurate, g, e, reference))
            if outcome.error is not None:
                yield f"{label}: " + " ".join(str(outcome.error).split())[:200]


def _metas(results: Any) -> list[Any]:
    results = results if isinstance(results, (tuple, list)) else [results]
    return [(r.dtype, r.shape) if isinstance(r, torch.Tensor) else type(r) for r in results]


def main() -> None:
    """Print every difference, and how many cases were compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="names of operators, separated by ;")
    parser.add_argument("--no-values", action="store_true", help="dtypes and exceptions only")
    parser.add_argument("--edges", action="store_true", help="values that go wrong most easily")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    only = set(given.only.split(";")) if given.only else None
    count = differing = 0
    for name, cases in (edge_groups() if given.edges else groups()).items():
        if only is not None and name not in only:
            continue
        every = list(cases())
        count += len(every)
        for line in differences(iter(every), values=not given.no_values):
            differing += 1
            print(line, flush=True)
        print(
            f"({name}: {len(every)} cases, {differing} of {count} differ so far)", file=sys.stderr
        )
    print(f"{differing} of {count} cases differ")


if __name__ == "__main__":
    main()
