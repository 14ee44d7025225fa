"""Compiled functions that write to memory which several arguments, or ``as_strided`` of a view, share."""

from __future__ import annotations

import pytest
import torch

from torch_xla.core import dynamo_bridge
from xla_core.dynamo.lost_order import LostOrderError
from xla_core.support import counters


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def write_second_read_first(x, y):
    y.add_(1)
    return x * 2


def read_first_write_second(x, y):
    doubled = x * 2
    y.add_(1)
    return doubled


def write_both(x, y):
    x.add_(1)
    y.mul_(3)
    return x * y.sum()


def with_gradients(x, y):
    weight = torch.ones((), device=x.device, requires_grad=True)
    y.add_(1)
    (gradient,) = torch.autograd.grad((x * weight).sum(), weight)
    return gradient


def only_read(x, y):
    return x * y.sum()


FUNCTIONS = [
    write_second_read_first,
    read_first_write_second,
    write_both,
    with_gradients,
    only_read,
]

ARGUMENTS = {
    "parts that overlap": lambda b: (b[1:4], b[2:5]),
    "parts that do not": lambda b: (b[0:3], b[3:6]),
    "parts, autograd apart": lambda b: (b[1:4].detach(), b[2:5].detach()),
    "parameters of one buffer": lambda b: tuple(
        torch.nn.Parameter(part, requires_grad=False) for part in b.split(3)
    ),
    "all and a part": lambda b: (b, b[4:]),
    "all twice": lambda b: (b, b.detach()),
    "a transpose": lambda b: (b.view(2, 3), b.view(3, 2).t()),
    "a part of another type": lambda b: (b.view(torch.int32), b[1:2]),
    "apart": lambda b: (b, b.clone()),
}


def run(function, arguments, device):
    base = torch.arange(6.0).to(device)
    x, y = arguments(base)
    result = function(x, y)
    return [t.detach().cpu() for t in (result, base, x, y)]


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_writes_to_shared_memory_show_in_all_arguments(function, kind):
    if kind == "a part of another type" and function is not only_read:
        pytest.skip("PyTorch refuses writes to views of another dtype in compiled functions")
    compiled = torch.compile(function, backend="openxla")
    expected = run(function, ARGUMENTS[kind], "cpu")
    torch.testing.assert_close(run(compiled, ARGUMENTS[kind], "xla"), expected)


def test_a_function_compiled_for_arguments_apart_is_right_for_shared_ones_and_back():
    compiled = torch.compile(write_second_read_first, backend="openxla")
    for kind in ("apart", "all twice", "apart", "all and a part", "all twice"):
        expected = run(write_second_read_first, ARGUMENTS[kind], "cpu")
        torch.testing.assert_close(run(compiled, ARGUMENTS[kind], "xla"), expected, msg=kind)


def test_shared_arguments_that_are_only_read_are_compiled():
    compiled = torch.compile(only_read, backend="openxla")
    run(compiled, ARGUMENTS["parts that overlap"], "xla")
    before = counters.all_counters().get("DynamoGraphRecordedAgain", 0)
    run(compiled, ARGUMENTS["parts that overlap"], "xla")
    assert counters.all_counters().get("DynamoGraphRecordedAgain", 0) == before


def fill_through_a_view(x):
    x[1:].as_strided((2,), (1,), 0).fill_(7)
    return x * 2


def fill_a_result_through_a_view(x):
    y = x.sin().view(2, 3).t()
    y.as_strided((2, 2), (2, 1), 1).mul_(5)
    return y


def fill_the_whole(x):
    y = x.sin()
    y.as_strided((2, 2), (2, 1), 1).mul_(5)
    return y


@pytest.mark.parametrize(
    "function", [fill_through_a_view, fill_a_result_through_a_view, fill_the_whole]
)
def test_a_write_through_as_strided_reaches_what_is_outside_of_the_view(function):
    """PyTorch refuses the first two when it compiles for the CPU, so they are compared uncompiled."""
    cpu = torch.arange(6.0)
    expected = function(cpu)
    compiled = torch.compile(function, backend="openxla")
    for _ in range(2):
        x = torch.arange(6.0).to("xla")
        torch.testing.assert_close(compiled(x).cpu(), expected)
        torch.testing.assert_close(x.cpu(), cpu)


def test_a_graph_without_a_backend_behind_it_is_refused_before_it_writes():
    def write(x, y):
        y.add_(1)
        return x * 2

    base = torch.arange(6.0).to("xla")
    graph = torch.fx.symbolic_trace(write)
    apart = dynamo_bridge.extract_compiled_graph(graph, (base, base.clone()))
    with pytest.raises(LostOrderError, match="argument 1, which shares memory with argument 0"):
        apart(base, base[:3])
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_graph_that_scatters_into_a_view_is_refused_with_the_line():
    def scatter(x):
        return torch.ops.aten.as_strided_scatter.default(
            torch.ops.aten.slice.Tensor(x, 0, 1), torch.zeros(2, device="xla"), [2], [1], 0
        )

    graph = torch.fx.symbolic_trace(scatter)
    with pytest.raises(LostOrderError, match=r"as_strided_scatter.* writes through as_strided\(\)"):
        dynamo_bridge.extract_compiled_graph(graph, (torch.arange(6.0, device="xla"),))


RESULTS = {
    "a value and a part": lambda y: (y, y[1:]),
    "parts that overlap": lambda y: (y[:4], y[2:]),
    "parts that do not": lambda y: y.split(3),
    "a transpose": lambda y: (y.view(2, 3), y.view(2, 3).t(), y[0]),
    "another type": lambda y: (y, y.view(torch.int32)[2:]),
    "expanded": lambda y: (y[:1].expand(3), y),
    "and one of its own": lambda y: (y[1:], y.sin(), y[:2]),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("backward", [False, True])
def test_results_that_show_one_value_see_each_others_writes(name, backward):
    """On the first call and when the program is there; what is only kept for backward beside them."""

    def function(x, weight):
        return (*RESULTS[name](x * 2), (x * weight).sin().sum())

    compiled = torch.compile(function, backend="openxla")
    for number in range(3):
        read = []
        for run, device in ((function, "cpu"), (compiled, "xla")):
            x = torch.arange(6.0).to(device) + number
            weight = torch.ones(6, device=device, requires_grad=backward)
            *views, loss = run(x, weight)
            for i, view in enumerate(views):
                if view.dtype == torch.float32 and name != "expanded":
                    view.mul_(i + 3)
            views[-1].add_(1)
            if backward:
                loss.backward()
                views.append(weight.grad)
            read.append([t.detach().cpu() for t in (*views, x)])
        torch.testing.assert_close(read[1], read[0])
