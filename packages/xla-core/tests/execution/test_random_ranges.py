"""Distributions that PyTorch refuses to draw from are refused at the call, in its words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

import torch_xla

inf, nan = float("inf"), float("nan")

DTYPES: Final = (
    torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64,
)  # fmt: skip
RANGES: Final = (
    (5, 5), (10, 5), (0, 2), (0, 128), (0, 300), (-1, 3), (-300, 3), (0, 2050), (0, 2**24 + 2),
    (-(2**24) - 2, 5), (0, 2**40), (0, 2**53 + 2), (2**62, 2**63 - 1), (3, None), (500, None),
    (-(2**63), None),
)  # fmt: skip
IN_PLACE: Final[dict[str, tuple[tuple[float, ...], ...]]] = {
    "random_": ((), (0,), (-1,), (2,), (300,), (2**53 + 2,)),
    "normal_": ((), (0, -1), (0, 0), (0, nan), (nan, 1)),
    "uniform_": (
        *((), (5, 1), (1, 1), (nan, 1), (0, inf), (-inf, 0), (0, 1e5), (-3e38, 3e38)),
        *((0, 1e39), (-1e308, 1e308)),
    ),
    "exponential_": ((), (0,), (-1,), (nan,), (inf,)),
    "geometric_": ((0.5,), (0,), (1,), (-1,), (2,), (nan,)),
    "bernoulli_": ((), (0,), (1,), (-0.1,), (1.5,), (nan,)),
    "cauchy_": ((), (0, 0), (0, -1), (0, nan)),
    "log_normal_": ((), (0, 0), (0, -1), (0, nan)),
}

Told = tuple[Any, list[str]]


def _told(draw: Callable[[str], Any], device: str) -> Told:
    """The dtype and shape drawn, or the error; and the warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            drawn = draw(device)
        except Exception as error:
            result: tuple[Any, ...] = (type(error), str(error))
        else:
            drawn = drawn[0] if isinstance(drawn, tuple) else drawn
            result = (drawn.dtype, drawn.shape)
    return result, [str(w.message) for w in warned]


def _assert_alike(draws: dict[str, Callable[[str], Any]]) -> None:
    different = {
        name: found
        for name, draw in draws.items()
        if (found := (_told(draw, "xla"), _told(draw, "cpu")))[0] != found[1]
    }
    assert different == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_of_integers(dtype: torch.dtype) -> None:
    draws: dict[str, Callable[[str], Any]] = {}
    for low, high in RANGES:
        draws[f"random_({low}, {high})"] = lambda device, low=low, high=high: torch.zeros(
            3, dtype=dtype, device=device
        ).random_(low, high)
        if high is None:
            continue
        draws[f"randint({low}, {high})"] = lambda device, low=low, high=high: torch.randint(
            low, high, (3,), dtype=dtype, device=device
        )
        draws[f"randint_like({low}, {high})"] = lambda device, low=low, high=high: (
            torch.randint_like(torch.zeros(3, dtype=dtype, device=device), low, high)
        )
        draws[f"randint({high})"] = lambda device, high=high: torch.randint(
            high, (3,), dtype=dtype, device=device
        )
    _assert_alike(draws)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_distributions_drawn_in_place(name: str, dtype: torch.dtype) -> None:
    _assert_alike(
        {
            f"{name}{arguments}": lambda device, arguments=arguments: getattr(
                torch.zeros(3, dtype=dtype, device=device), name
            )(*arguments)
            for arguments in IN_PLACE[name]
        }
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_that_return_random_tensors(dtype: torch.dtype) -> None:
    def ones(device: str) -> torch.Tensor:
        return torch.ones(3, dtype=dtype, device=device)

    draws: dict[str, Callable[[str], Any]] = {
        "rand": lambda d: torch.rand(3, dtype=dtype, device=d),
        "randn": lambda d: torch.randn(3, dtype=dtype, device=d),
        "rand_like": lambda d: torch.rand_like(ones(d)),
        "randn_like": lambda d: torch.randn_like(ones(d)),
        "normal": lambda d: torch.normal(0.0, -1.0, (3,), dtype=dtype, device=d),
        "normal of a mean": lambda d: torch.normal(ones(d), -1.0),
        "normal of a deviation": lambda d: torch.normal(0.0, ones(d)),
        "normal of both": lambda d: torch.normal(ones(d), ones(d)),
        "bernoulli": lambda d: torch.bernoulli(ones(d)),
        "bernoulli(-1)": lambda d: torch.bernoulli(ones(d), -1.0),
        "bernoulli(2)": lambda d: torch.bernoulli(ones(d), 2.0),
        "poisson": lambda d: torch.poisson(ones(d)),
        "multinomial": lambda d: torch.multinomial(ones(d), 2),
        "multinomial of too many": lambda d: torch.multinomial(ones(d), 4),
        "multinomial of none": lambda d: torch.multinomial(ones(d), 0),
        "native_dropout(2)": lambda d: torch.native_dropout(ones(d), 2.0, True),
        **{
            f"randperm({n})": lambda d, n=n: torch.randperm(n, dtype=dtype, device=d)
            for n in (-1, 0, 129, 257, 2050)
        },
    }
    _assert_alike(draws)


def test_a_generator_does_not_hide_a_mistake() -> None:
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(RuntimeError, match="'from' to be less than 'to'"):
        torch.randint(3, 3, (2,), generator=generator, device="xla")
    with pytest.raises(RuntimeError, match=r"std >= 0\.0"):
        torch.zeros(2, device="xla").normal_(0, -1, generator=generator)


def test_numbers_are_looked_at_in_each_run_of_a_step() -> None:
    # they are operands of the program: the same step with others is found, and not built anew
    def step(deviation: float) -> torch.Tensor:
        drawn = torch.zeros(3, device="xla").normal_(0.5, deviation)
        torch_xla.sync()
        return drawn

    step(2.0)
    step(3.0)
    with pytest.raises(RuntimeError, match=r"normal expects std >= 0\.0"):
        step(-2.0)


def test_a_refused_call_draws_nothing_and_changes_nothing() -> None:
    x = torch.arange(3.0, device="xla")
    torch.manual_seed(3)
    expected, expected_on_cpu = torch.rand(2, device="xla").cpu(), torch.rand(2)
    torch.manual_seed(3)
    for refused in (lambda: x.uniform_(5, 1), lambda: x.random_(4, 4), lambda: x.bernoulli_(2)):
        with pytest.raises(RuntimeError):
            refused()
    with pytest.warns(UserWarning, match="Due to precision limitations") as warned:
        torch.zeros(2, device="xla").random_(0, 2**24 + 2)
    assert [w.filename for w in warned] == [__file__]
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="less than 'to'"):
        torch.randint(0, (2,), device="xla")
    assert torch.equal(torch.rand(2, device="xla").cpu(), expected)
    assert torch.equal(torch.rand(2), expected_on_cpu)
    assert x.tolist() == [0, 1, 2]
