"""Operators of others, with kernels that they registered with PyTorch for xla tensors."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla


@pytest.fixture
def acme():
    """A library with operators that have a kernel for xla tensors; one has another for all devices."""
    with torch.library._scoped_library("acme_kernels", "FRAGMENT") as library:
        library.define("twice(Tensor x, *, int more=0) -> Tensor")
        library.define("clear_(Tensor(a!) x) -> Tensor(a!)")
        library.define("both(Tensor x) -> (Tensor, Tensor)")
        library.impl("twice", lambda x, more=0: x * 2 + more, "XLA")
        library.impl("twice", lambda x, more=0: torch.empty_like(x), "Meta")
        library.impl("clear_", lambda x: x.zero_(), "XLA")
        library.impl("both", lambda x: (x, x), "CompositeExplicitAutograd")
        library.impl("both", lambda x: (x + 1, x.sum()), "XLA")
        yield torch.ops.acme_kernels


def test_they_are_recorded_with_the_step(acme, compile_count, fallbacks):
    x = torch.arange(3.0, device="xla")
    torch_xla.sync()
    before = compile_count()
    y = acme.twice(x.sin(), more=5)
    first, second = acme.both(y)
    cleared = acme.clear_(y + 0)
    torch_xla.sync()
    assert compile_count() == before + 1
    assert not fallbacks()
    expected = torch.arange(3.0).sin() * 2 + 5
    torch.testing.assert_close(y.cpu(), expected)
    torch.testing.assert_close(first.cpu(), expected + 1)
    torch.testing.assert_close(second.cpu(), expected.sum())
    assert cleared.tolist() == [0.0] * 3


def test_they_are_part_of_compiled_functions(acme):
    compiled = torch.compile(lambda x: acme.twice(x) + 1, backend="openxla")
    x = torch.ones(4, device="xla")
    torch_xla.sync()
    assert compiled(x).tolist() == compiled(x).tolist() == [3.0] * 4


def test_an_operator_without_such_a_kernel_runs_on_the_cpu_as_ever():
    with torch.library._scoped_library("acme_on_cpu", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: x / 2, "CPU")
        library.impl("half", lambda x: torch.empty_like(x), "Meta")
        with pytest.warns(UserWarning, match="acme_on_cpu::half has no XLA lowering"):
            found = torch.ops.acme_on_cpu.half(torch.ones(2, device="xla"))
        assert found.tolist() == [0.5, 0.5]


def test_operators_that_are_gone_leave_no_kernel_to_others():
    """Another operator got the object's id and so a kernel that was gone: MemoryError, or anything else."""
    x = torch.zeros(2, device="xla")
    known = set()
    for number in range(40):
        with torch.library._scoped_library(f"acme_passing_{number}", "DEF") as library:
            library.define("number(Tensor x) -> Tensor")
            library.impl("number", lambda x, number=number: x + number, "XLA")
            overload = getattr(torch.ops, f"acme_passing_{number}").number.default
            assert id(overload) not in known
            known.add(id(overload))
            assert overload(x).tolist() == [number, number]
        del overload
        gc.collect(1)
