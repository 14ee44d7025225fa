"""Caches have names and bounds, and clearing the cache of programs empties all of them."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla
import torch_xla.runtime as xr
from xla_core.compilation import program_table
from xla_core.computations import computation
from xla_core.operators import tensor_meta as module
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.support import caches


@pytest.fixture
def listing(monkeypatch):
    """The listed caches; what a test lists is gone after it."""
    monkeypatch.setattr(caches, "_registered", dict(caches._registered))
    return caches.registered


def test_all_that_is_listed_is_emptied(listing, monkeypatch):
    told = []
    caches.register("of a test", bound=1, size=lambda: 0, clear=lambda: told.append("cleared"))
    monkeypatch.setitem(computation._plans, "of a test", None)
    (torch.ones(3).to("xla") + 1).tolist()
    assert program_table.all_programs()
    xr.clear_computation_cache()
    assert told == ["cleared"]
    assert not computation._plans
    assert not program_table.all_programs()


def test_a_name_is_given_once(listing):
    caches.Bounded("of a test")
    with pytest.raises(ValueError, match="there is a cache 'of a test' already"):
        caches.Bounded("of a test")


def test_the_older_half_goes_when_a_cache_is_full(listing):
    cache = caches.Bounded("of a test", 4)
    for number in range(4):
        assert cache.keep(number, -number) == -number
    assert cache.keep(2, 2) == 2
    assert dict(cache) == {0: 0, 1: -1, 2: 2, 3: -3}
    cache.keep(4, -4)
    assert dict(cache) == {2: 2, 3: -3, 4: -4}
    known = listing()["of a test"]
    assert (known.size(), known.bound()) == (3, 4)
    known.clear()
    assert not cache


def test_a_memoized_function_is_listed(listing):
    calls = []

    @caches.memoized("of a test", 2)
    def twice(x):
        calls.append(x)
        return 2 * x

    assert [twice(1), twice(1), twice(2), twice(3)] == [2, 2, 4, 6]
    assert calls == [1, 2, 3]
    known = listing()["of a test"]
    assert (known.size(), known.bound()) == (2, 2)
    known.clear()
    assert twice(3) == 6
    assert calls == [1, 2, 3, 3]


def test_no_cache_is_over_its_bound_after_work():
    model = torch.nn.Linear(4, 4).to("xla")
    for rows in range(1, 5):
        model(torch.ones(rows, 4, device="xla")).sum().backward()
        torch_xla.sync()
    known = caches.registered()
    assert {"programs", "shapes and dtypes", "plans of computations"} <= known.keys()
    assert {name for name, cache in known.items() if cache.size() > cache.bound()} == set()


def test_shapes_that_nobody_has_any_more_are_forgotten():
    # no other test has such shapes
    kept = tensor_meta((77, 1, 77), torch.float32)
    indices = {tensor_meta((78, n, 78), torch.float32).index for n in range(100)}
    gc.collect()
    known = caches.registered()["shapes and dtypes"]
    before = known.size()
    known.clear()
    assert known.size() <= before - 100
    assert tensor_meta((77, 1, 77), torch.float32) is kept
    assert tensor_meta((78, 5, 78), torch.float32).index not in indices


def test_shapes_are_bounded_by_those_in_use(monkeypatch):
    caches.registered()["shapes and dtypes"].clear()
    in_use = len(module._interned)
    monkeypatch.setattr(module._Sweep, "at", in_use + 50)
    monkeypatch.setattr(caches, "MOST", 50)
    for n in range(1000):
        tensor_meta((79, n), torch.float32)
        if n % 20 == 0:
            gc.collect(1)  # of what is new: all that there is takes a third of a second
    bound = caches.registered()["shapes and dtypes"].bound()
    assert len(module._interned) <= bound
    assert bound <= 2 * (in_use + 50)
