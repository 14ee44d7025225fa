"""Numbers that a dtype cannot hold: refused where the CPU refuses them, also after numbers that were taken.

A number is an argument of the program, so that another one records the same operation again. What PyTorch says of
this number must not be lost by that.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

import torch_xla

DTYPES = [torch.uint8, torch.int64, torch.bool, torch.float16, torch.float32]
NUMBERS = [70_000, 2**40, 1e30, math.inf, 2 + 1j]


def mask(x):
    return torch.tensor([True, False, True], device=x.device)


def places(x):
    return torch.tensor([0, 2], device=x.device)


def square(x):
    return torch.ones(2, 2, dtype=x.dtype, device=x.device)


OPERATORS = {
    "masked_fill": lambda x, v: x.masked_fill(mask(x), v),
    "masked_fill_": lambda x, v: x.clone().masked_fill_(mask(x), v),
    "masked_fill of a tensor": lambda x, v: x.masked_fill(mask(x), torch.tensor(v)),
    "index_fill": lambda x, v: x.index_fill(0, places(x), v),
    "index_fill of a tensor": lambda x, v: x.index_fill(0, places(x), torch.tensor(v)),
    "fill_": lambda x, v: x.clone().fill_(v),
    "fill_ of one element": lambda x, v: x[:1].clone().fill_(v),
    "fill_diagonal_": lambda x, v: square(x).fill_diagonal_(v),
    "full": lambda x, v: torch.full((2,), v, dtype=x.dtype, device=x.device),
    "full_like": lambda x, v: torch.full_like(x, v),
    "new_full": lambda x, v: x.new_full((2,), v),
    "scatter": lambda x, v: x.scatter(0, places(x), v),
    "scatter, multiplying": lambda x, v: x.scatter(0, places(x), v, reduce="multiply"),
    "where": lambda x, v: torch.where(mask(x), x, v),
    "x[mask] = v": lambda x, v: x.clone().__setitem__(mask(x), v),
    "x[0] = v": lambda x, v: x.clone().__setitem__(0, v),
    "x[:2] = v": lambda x, v: x.clone().__setitem__(slice(0, 2), v),
    "add": lambda x, v: x + v,
    "add, alpha": lambda x, v: torch.add(x, x, alpha=v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "addmm, beta": lambda x, v: torch.addmm(square(x), square(x), square(x), beta=v),
    "index_add, alpha": lambda x, v: x.index_add(0, places(x), x[:2], alpha=v),
    "clamp": lambda x, v: x.clamp(max=v),
    "eq": lambda x, v: x == v,
    "elu": lambda x, v: F.elu(x, v),
    "leaky_relu": lambda x, v: F.leaky_relu(x, v),
    "threshold": lambda x, v: F.threshold(x, 1, v),
}


def outcome(run, dtype, device, v):
    x = torch.tensor([1, 0, 1]).to(dtype).to(device)
    try:
        with warnings.catch_warnings(action="ignore"):  # of complex32, and of what runs on the CPU
            result = run(x, v)
    except Exception as error:
        return type(error), "without overflow" in str(error)
    return None if result is None else result.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_after_those_that_fit(name, dtype):
    run = OPERATORS[name]
    more = [1e300] if dtype == torch.float32 else []
    for v in (3, 2.5, *NUMBERS, *more):  # the first ones record the operation
        expected, got = (outcome(run, dtype, device, v) for device in ("cpu", "xla"))
        if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
            torch.testing.assert_close(got, expected, equal_nan=True, msg=f"{v}")
        else:
            assert got == expected, v


def test_numbers_that_fit_share_one_program(compile_count):
    x = torch.ones(3, dtype=torch.int32, device="xla")
    torch_xla.sync()
    before = compile_count()
    for v in (2, 300, 70_000, -5_000_000):
        (x * v + 1000).cpu()
    assert compile_count() == before + 1


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("v", [0.5, 2.5, 1e30, -1e30, math.inf, math.nan])
def test_a_float_is_searched_among_integers(v, right):
    edges = torch.tensor([0, 1, 1, 7], dtype=torch.int32)
    on_xla = edges.to("xla")
    assert torch.searchsorted(on_xla, v, right=right).item() == torch.searchsorted(
        edges, v, right=right
    )
    assert torch.bucketize(v, on_xla, right=right).item() == torch.bucketize(v, edges, right=right)


def test_integers_are_not_divided_by_the_number_zero():
    x = torch.tensor([1, 2], device="xla")
    assert (x // 3).tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x // 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x.floor_divide_(0)


def test_negative_settings_are_refused():
    x = torch.ones(2, 2, device="xla")
    F.smooth_l1_loss(x, x + 1, beta=0.5)
    with pytest.raises(RuntimeError, match="negative values for beta"):
        F.smooth_l1_loss(x, x + 1, beta=-1.0)
    x.half().renorm(2, 0, 1.5)
    with pytest.raises(RuntimeError, match="maxnorm"):
        x.half().renorm(2, 0, -1.5)
