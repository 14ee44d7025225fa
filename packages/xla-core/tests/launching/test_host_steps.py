"""A few operations on a few integers that are read at once need no program where sizes vary."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from xla_core.launching.host_steps import ON_HOST
from xla_core.support import caches, counters


@pytest.fixture
def turned_on(monkeypatch):
    """Varying shapes are on, and no step is known."""
    monkeypatch.setenv("XLA_VARYING_SHAPES", "1")
    caches.clear_all()
    yield
    caches.clear_all()


@pytest.fixture
def on_host(turned_on):
    """A function that says how many steps were computed on the CPU since the test began."""
    before = counters.all_counters().get(ON_HOST, 0)
    return lambda: counters.all_counters().get(ON_HOST, 0) - before


def test_a_question_about_a_mask_needs_no_program(on_host, compile_count):
    before = compile_count()
    for length in range(2, 12):
        mask = torch.ones(3, length, dtype=torch.int64)
        mask[1, -1] = length % 2
        assert bool((mask.to("xla")[:, -1] == 0).any()) == (length % 2 == 0)
    assert on_host() == 10
    assert compile_count() == before


def test_all_values_of_the_step_are_there_afterwards(on_host, compile_count):
    before = compile_count()
    ids = torch.tensor([[0, 5, 7], [3, 4, 9]])
    x = ids.to("xla")
    mask = x != 0
    positions = mask.long().cumsum(-1) - 1
    filled = positions.masked_fill(~mask, 1)
    x.add_(40)
    assert int(filled.sum()) == 5
    assert compile_count() == before and on_host() == 1
    assert torch.equal(filled.cpu(), torch.tensor([[1, 0, 1], [0, 1, 2]]))
    assert torch.equal(mask.cpu(), ids != 0)
    assert torch.equal(x.cpu(), ids + 40)
    torch_xla.sync()
    assert torch.equal((x * 2).cpu(), (ids + 40) * 2)


def test_numbers_of_the_step_are_those_of_this_run(on_host):
    for number in (7, 8, 9):
        x = torch.tensor([1, 2, 3]).to("xla")
        assert (x * number + torch.tensor(number)).tolist() == [
            number * n + number for n in (1, 2, 3)
        ]
    assert on_host() == 3


def test_a_step_that_comes_often_is_compiled(on_host, compile_count):
    before = compile_count()
    for _ in range(8):
        assert int((torch.tensor([1, 2, 3]).to("xla") * 5).sum()) == 30
    assert on_host() == 4
    assert compile_count() == before + 1


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.ones(3, device="xla").sum(),
        lambda: torch.arange(5000, device="xla").sum(),
        lambda: torch.randint(0, 9, (3,), device="xla").sum(),
        lambda: sum(torch.arange(4, device="xla") + n for n in range(2, 30)).sum(),
    ],
    ids=["floats", "many elements", "random numbers", "many operations"],
)
def test_other_steps_have_programs(step, on_host, compile_count):
    before = compile_count()
    assert step().item() >= 0
    assert on_host() == 0
    assert compile_count() > before


def test_what_the_cpu_refuses_is_left_to_the_device(on_host):
    # the CPU raises ZeroDivisionError as a RuntimeError; what comes of it here is the device's
    one, none = torch.tensor([4, 2]).to("xla"), torch.tensor([2, 0]).to("xla")
    assert torch.div(one, none, rounding_mode="floor").cpu()[0] == 2
    assert on_host() == 0


def test_a_question_without_gradients_needs_no_program_once(on_host, monkeypatch, compile_count):
    monkeypatch.delenv("XLA_VARYING_SHAPES")
    before = compile_count()
    with torch.no_grad():
        for length in range(2, 6):
            mask = torch.ones(3, length, dtype=torch.int64).to("xla")
            assert not (mask[:, -1] == 0).any()
        assert on_host() == 4 and compile_count() == before
        for _ in range(3):
            assert not (mask[:, -1] == 0).any()
        assert on_host() == 4 and compile_count() == before + 1


@pytest.mark.parametrize(
    "step",
    [
        lambda: (torch.tensor([1, 2, 3]).to("xla") * 5)[1:].tolist(),
        lambda: (torch.tensor(3).to("xla") + 1).item(),
    ],
    ids=["several results", "one operand"],
)
def test_what_is_no_question_has_a_program(step, on_host, monkeypatch, compile_count):
    monkeypatch.delenv("XLA_VARYING_SHAPES")
    before = compile_count()
    with torch.no_grad():
        assert step()
    assert on_host() == 0 and compile_count() == before + 1


def test_without_the_feature_all_steps_have_programs(on_host, monkeypatch, compile_count):
    monkeypatch.delenv("XLA_VARYING_SHAPES")
    before = compile_count()
    assert int((torch.tensor([1, 2, 3]).to("xla") * 5).sum()) == 30
    assert on_host() == 0
    assert compile_count() == before + 1
