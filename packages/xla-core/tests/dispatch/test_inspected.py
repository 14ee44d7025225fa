"""Operators whose result's shape depends on values: on the device, as on the CPU, nothing counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_xla
from xla_core.operators import lowering_registry
from xla_core.testing.against_cpu import assert_agrees_with_cpu, assert_same

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
T = torch.tensor


@pytest.fixture(autouse=True)
def on_the_device(fallbacks):
    yield
    assert fallbacks() == {}


agree = assert_agrees_with_cpu


VALUES = {
    "float": T([[3.0, 1.0, 1.0], [NAN, 3.0, NAN]]),
    "int": T([[3, 1, 1], [2, 3, 0], [3, 1, 1]]),
    "bool": T([[True, True], [True, True], [False, True]]),
    "bfloat16": T([[0.5, -2.0], [0.5, -2.0]], dtype=torch.bfloat16),
    "three dimensions": torch.arange(24).reshape(4, 2, 3) % 5 // 2,
    "empty": torch.empty(0),
    "no rows": torch.empty(0, 3),
    "no columns": torch.empty(2, 0, 3),
    "number": T(5.0),
}
SELECTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": torch.nonzero,
    "tuple": lambda x: torch.nonzero(x, as_tuple=True),
    "argwhere": torch.argwhere,
    "masked_select": lambda x: torch.masked_select(x, x[:1] != 1),
    "mask": lambda x: x[x != 0],
    "mask of rows": lambda x: x[x.flatten(1).sum(1) > 3],
    "unique": lambda x: aten._unique2(x, True, True, True),
    "values alone": torch.unique,
    "_unique": lambda x: aten._unique(x, False, True),
    "unique of rows": lambda x: aten.unique_dim(x, 0, True, True, True),
    "unique of columns": lambda x: aten.unique_dim(x, -1),
    "unique_consecutive": lambda x: aten.unique_consecutive(x, True, True),
    "consecutive values alone": torch.unique_consecutive,
    "consecutive rows": lambda x: aten.unique_consecutive(x, False, False, 0),
    "unique_dim_consecutive": lambda x: aten.unique_dim_consecutive(x, 1),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_values_select(name: str) -> None:
    for x in VALUES.values():
        agree(SELECTIONS[name], x)


def test_wrong_selections() -> None:
    x = T([[1.0, 2.0]])
    agree(torch.masked_select, x, T([[1, 0]]))
    agree(torch.masked_select, x, T([True, False, True]))
    agree(torch.unique, x + 1j)
    agree(torch.unique, x, dim=2)
    agree(aten.unique_dim, T(1.0), 0)


COUNTS = T([1, 2, 5])
COUNTED: dict[str, tuple[Any, ...]] = {
    "plain": (COUNTS,),
    "int weights": (COUNTS, T([1, 2, 3])),
    "float weights": (COUNTS, T([1.5, 2.0, 3.0])),
    "bfloat16 weights": (COUNTS, T([1.5, 2.0, 3.0], dtype=torch.bfloat16)),
    "longer": (COUNTS, None, 9),
    "uint8": (COUNTS.to(torch.uint8),),
    "empty": (COUNTS[:0], None, 3),
    "negative": (-COUNTS,),
    "negative length": (COUNTS, None, -1),
    "floats": (COUNTS.float(),),
    "two dimensions": (COUNTS[None],),
    "too few weights": (COUNTS, T([1.0])),
}


@pytest.mark.parametrize("name", COUNTED)
def test_bincount(name: str) -> None:
    agree(torch.bincount, *COUNTED[name])


X = T([1.0, 2.0, 2.5, 3.0, 5.0])
HISTOGRAMS: dict[str, tuple[torch.Tensor, Any, dict[str, Any]]] = {
    "equal bins": (X, 4, {}),
    "a range": (X, 4, {"range": (2.0, 3.0)}),
    "an empty range": (X, 3, {"range": (2.0, 2.0)}),
    "weight and density": (X, 4, {"weight": X.sin(), "density": True}),
    "edges": (X, T([1.0, 3.0, 3.0, 5.0]), {}),
    "descending edges": (X, T([5.0, 2.0, 1.0]), {}),
    "level": (torch.ones(3), 3, {}),
    "nothing": (X[:0], 3, {}),
    "doubles": (torch.linspace(-1, 1, 50, dtype=torch.float64).sin(), 7, {}),
    "a NaN in a range": (T([NAN, 1.0, 7.0]), 3, {"range": (0.0, 7.0)}),
    "a NaN": (T([NAN, 1.0]), 3, {}),
    "an infinity": (T([INF, 1.0]), 3, {}),
    "range backwards": (X, 4, {"range": (3.0, 2.0)}),
    "infinite range": (X, 4, {"range": (3.0, INF)}),
    "no bins": (X, 0, {}),
    "bfloat16": (X.bfloat16(), 3, {}),
    "weights of another shape": (X, 3, {"weight": X[:4]}),
    "weights of another dtype": (X, 3, {"weight": X.double()}),
    "edges of another dtype": (X, X.double(), {}),
    "edges in a matrix": (X, X[None], {}),
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histogram(name: str) -> None:
    x, bins, named = HISTOGRAMS[name]
    agree(torch.histogram, x, bins, **named)


POINTS = torch.linspace(0, 9, 60).sin().reshape(20, 3)


def test_histograms_of_points() -> None:
    agree(torch.histogramdd, POINTS, [2, 3, 4])
    agree(torch.histogramdd, POINTS.reshape(4, 5, 3), 2, weight=POINTS[:, 0].reshape(4, 5))
    agree(torch.histogramdd, POINTS, [2, 3, 2], range=[0.0, 1, 0, 2, 0.2, 0.3], density=True)
    agree(torch.histogramdd, POINTS[:, :2], [T([0, 0.5, 1]), T([-1, 1.0])])
    agree(torch.histogramdd, POINTS, [2, 3])
    agree(torch.histogramdd, POINTS * INF, 3)


def test_repeat_interleave() -> None:
    for repeats in (COUNTS, COUNTS.int(), COUNTS * 0, COUNTS[:0], -COUNTS, COUNTS.float()):
        agree(torch.repeat_interleave, repeats)
    agree(torch.repeat_interleave, COUNTS[None])
    agree(torch.repeat_interleave, POINTS[:3], COUNTS, dim=0)
    agree(torch.repeat_interleave, POINTS[:3], COUNTS, dim=0, output_size=8)


def test_gradients() -> None:
    found = []
    for device in ("cpu", "xla"):
        x = POINTS[:4].detach().to(device).requires_grad_()
        mask = x > 0
        picked = torch.masked_select(x, mask).square().sum() + (x[mask] * 3).sin().sum()
        rows = x[mask[:, 0]].exp().sum() + x.repeat_interleave(T([0, 1, 2, 3]).to(device), 0).sum()
        found.append(torch.autograd.grad(picked + rows, x)[0])
    assert_same(found[1], found[0])


def test_out_arguments() -> None:
    x = T([[0, 3], [2, 0]], device="xla")
    positions, picked = torch.empty(0, dtype=torch.int64, device="xla"), x.new_empty(0)
    assert torch.nonzero(x, out=positions) is positions
    torch.masked_select(x, x > 1, out=picked)
    assert (positions.tolist(), picked.tolist()) == ([[0, 1], [1, 0]], [3, 2])


def test_writes_to_a_cut_result_stay_in_it() -> None:
    positions = torch.nonzero(T([0, 3, 0, 4], device="xla"))
    positions.add_(10)
    positions[0] = 7
    assert positions.tolist() == [[7], [13]]
    assert torch.cat([positions, positions]).shape == (4, 1)


def test_writing_under_a_mask_of_the_device() -> None:
    x, mask = torch.arange(6.0).reshape(2, 3), T([[True, False, True], [False, True, False]])
    y = x.to("xla")
    x[mask] = T([9.0, 8.0, 7.0])
    y[mask.to("xla")] = T([9.0, 8.0, 7.0]).to("xla")
    assert_same(y, x)


def test_one_program_whatever_the_count(compile_count: Callable[[], int]) -> None:
    def positions(values: list[int]) -> list[list[int]]:
        x = T(values).to("xla")
        return torch.nonzero(x * 2).tolist()

    assert positions([1, 0, 1]) == [[0], [2]]
    before = compile_count()
    assert positions([0, 0, 0]) == []
    assert positions([1, 1, 1]) == [[0], [1], [2]]
    assert compile_count() == before


def test_large_results_give_up_what_is_cut_off() -> None:
    x = torch.zeros(300_000, dtype=torch.int32, device="xla")
    x[7] = 1
    found = torch.nonzero(x)
    torch_xla.sync()
    assert found._v is None and found._s.meta.shape == (1, 1)
    assert found.tolist() == [[7]]


def test_an_overload_is_ruled_once() -> None:
    with pytest.raises(ValueError, match=r"duplicate lowering rule for aten\.nonzero\.default"):
        lowering_registry.rule(aten.nonzero.default)(lambda x: x)
    with pytest.raises(ValueError, match=r"duplicate lowering rule for aten\.sin\.default"):
        lowering_registry.inspected_rule(aten.sin.default, meta=lambda x: x)(lambda x: x)
