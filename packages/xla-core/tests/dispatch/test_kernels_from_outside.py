"""Operators of others, with kernels that they registered with PyTorch for xla tensors."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla
from xla_core.support import counters


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


@pytest.fixture
def counted():
    """A function that says how often an operator ran on the CPU since the test began."""
    before = counters.all_counters()
    return lambda name: counters.all_counters().get(name, 0) - before.get(name, 0)


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


@pytest.mark.filterwarnings("ignore::xla_core.dispatch.cpu_fallback.FallbackWarning")  # at first
def test_they_may_be_registered_after_the_first_call():
    for number, device_types in enumerate((None, "cpu")):
        wide = torch.library.custom_op(
            f"acme_later::wide_{number}", lambda x: x + 1, mutates_args=(),
            device_types=device_types, schema="(Tensor x) -> Tensor",
        )  # fmt: skip
        x = torch.ones(3, device="xla")
        assert wide(x).tolist() == [2.0] * 3
        wide.register_kernel("xla", lambda x: x + 10)
        assert wide(x).tolist() == wide(x).tolist() == [11.0] * 3
        assert wide(x.cpu()).tolist() == [2.0] * 3


# -- kernels for every device, as torch.library.custom_op registers them ---------------------------


@torch.library.custom_op("acme_everywhere::wave", mutates_args=())
def wave(x: torch.Tensor, size: float) -> torch.Tensor:
    return x.sin() * size


@wave.register_fake
def _(x, size):
    return torch.empty_like(x)


wave.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0].cos() * ctx.size, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "size", inputs[1]),
    ),
)


@torch.library.custom_op("acme_everywhere::add_first", mutates_args=("x",))
def add_first(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)
    x[0] = 7


@torch.library.custom_op("acme_everywhere::double_by_numpy", mutates_args=("x",))
def double_by_numpy(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)  # must not be done twice
    return torch.from_numpy(x.numpy() * 2)


@torch.library.custom_op("acme_everywhere::by_way_of_host", mutates_args=())
def by_way_of_host(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.cpu().numpy() * 2)


@by_way_of_host.register_fake
def _(x):
    return torch.empty_like(x)


def shifted_wave(x):
    return wave(x * 2, 3.0) + 1


def trained(x, function):
    y = function(x)
    y.sum().backward()
    return y.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_for_every_device_is_recorded(compiled, compile_count, counted):
    x = torch.arange(3.0, device="xla", requires_grad=True)
    torch_xla.sync()
    before = compile_count()
    run = torch.compile(shifted_wave, backend="openxla") if compiled else shifted_wave
    found = trained(x, run)
    # compiled: forward, the gradient of the sum, backward
    assert compile_count() - before <= (3 if compiled else 2)
    assert counted("acme_everywhere::wave") == 0
    torch.testing.assert_close(found, trained(torch.arange(3.0, requires_grad=True), shifted_wave))


def test_a_library_s_kernel_for_every_device_is_recorded(counted):
    with torch.library._scoped_library("acme_scoped", "FRAGMENT") as library:
        library.define("third(Tensor x) -> Tensor")
        library.impl("third", lambda x: x / 3, "CompositeExplicitAutograd")
        assert torch.ops.acme_scoped.third(torch.ones(1, device="xla") * 3).tolist() == [1.0]
    assert counted("acme_scoped::third") == 0


def written(x):
    add_first(x[1], x[0])
    return x * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_what_it_writes_is_the_argument(compiled, counted):
    x, expected = torch.ones(2, 3, device="xla"), torch.ones(2, 3)
    version = x._version
    run = torch.compile(written, backend="openxla") if compiled else written
    torch.testing.assert_close(run(x).cpu(), written(expected))
    torch.testing.assert_close(x.cpu(), expected)
    assert x._version > version
    assert counted("acme_everywhere::add_first") == 0


def test_a_function_that_reads_memory_runs_on_the_cpu(counted):
    x = torch.ones(2, device="xla")
    with pytest.warns(UserWarning, match="double_by_numpy has no XLA lowering"):
        assert double_by_numpy(x).tolist() == [4.0] * 2
    assert double_by_numpy(x).tolist() == [6.0] * 2
    assert x.tolist() == [3.0] * 2
    assert counted("acme_everywhere::double_by_numpy") == 2


def test_a_function_that_computes_on_the_host_gives_results_on_the_device():
    x = torch.ones(2, device="xla")
    assert by_way_of_host(x).device == x.device
    compiled = torch.compile(lambda x: by_way_of_host(x + 1) * 3, backend="openxla")
    assert compiled(x).tolist() == [12.0] * 2
    assert compiled(x + 1).tolist() == [18.0] * 2  # what was read is no part of the program


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
