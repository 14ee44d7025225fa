"""``torch_xla.compile``, ``torch_xla.step``, step closures and eager mode."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import experimental
from xla_core.api import program_report
from xla_core.execution import step_closures
from xla_core.support import counters


def runs():
    return sum(p.runs for p in program_report.program_runs())


def step_of(x):
    return (x * 2).sum()


@pytest.mark.parametrize("use", ["call", "bare decorator", "decorator", "block", "step"])
def test_each_use_is_one_program(use):
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    pending = x + 1  # is run before, on its own
    before = runs()
    if use == "call":
        y = torch_xla.compile(step_of)(x)
    elif use == "bare decorator":

        @torch_xla.compile
        def decorated(x):
            return step_of(x)

        assert decorated.__name__ == "decorated"
        y = decorated(x)
    elif use == "decorator":

        @torch_xla.compile(full_graph=True, name="mine")
        def decorated(x):
            return step_of(x)

        y = decorated(x)
    elif use == "block":
        with torch_xla.compile():
            y = step_of(x)
    else:
        with torch_xla.step():
            y = step_of(x)
    assert runs() == before + 2
    assert y._s.buffer is not None  # enqueued already
    assert y.item() == 6
    assert pending.tolist() == [2, 2, 2]


def test_a_module_and_a_training_step():
    model = nn.Linear(4, 2).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch_xla.compile(model)(torch.ones(1, 4, device="xla")).shape == (1, 2)

    @torch_xla.compile(full_graph=True)
    def train(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [train(torch.ones(3, 4, device="xla")).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    "read", [lambda t: t.item(), print, lambda t: bool(t > 0), lambda _: torch_xla.sync()]
)
def test_full_graph_forbids_execution_inside(read):
    @torch_xla.compile(full_graph=True)
    def f(x):
        y = x + 1
        read(y)
        return y

    x = torch.ones((), device="xla")
    with pytest.raises(
        RuntimeError, match="Unexpected execution happens inside the compiled function"
    ):
        f(x)
    assert (x + 1).item() == 2  # afterwards all is as before


def test_without_full_graph_values_may_be_read():
    f = torch_xla.compile(lambda x: x * 2 if (x + 1).item() > 0 else x)
    assert f(torch.ones((), device="xla")).item() == 2


def two_different(x):
    return x.exp() + 1


class Scaled:
    """An object with a method that is compiled, and no state that matters."""

    def times(self, x):
        return x * 3 + 1


def test_the_limit_of_graphs_is_the_functions_whoever_wraps_it():
    def rows(count):
        return torch.ones(count, device="xla")

    limited = {"max_different_graphs": 1}
    torch_xla.compile(two_different, **limited)(rows(2))
    torch_xla.compile(two_different, **limited)(rows(2))
    with pytest.raises(RuntimeError, match="allowed per function exceeded: 1"):
        torch_xla.compile(**limited)(two_different)(rows(3))
    torch_xla.compile(two_different, max_different_graphs=2)(rows(3))
    first, second = Scaled(), Scaled()
    torch_xla.compile(first.times, **limited)(rows(2))
    torch_xla.compile(second.times, **limited)(rows(3))  # another object's method
    with pytest.raises(RuntimeError, match="exceeded: 1"):
        torch_xla.compile(first.times, **limited)(rows(3))
    model = nn.Linear(2, 2).to("xla")
    torch_xla.compile(model, **limited)(torch.ones(1, 2, device="xla"))
    with pytest.raises(RuntimeError, match="exceeded: 1"):
        torch_xla.compile(model, **limited)(torch.ones(3, 2, device="xla"))


def test_one_decorator_counts_each_of_its_functions():
    limited = torch_xla.compile(max_different_graphs=1)
    f, g = limited(lambda x: x + 5), limited(lambda x: x * 5)
    x = torch.ones(3, device="xla")
    assert f(x).tolist() == [6.0] * 3 and g(x).tolist() == [5.0] * 3


def test_too_many_different_graphs():
    f = torch_xla.compile(lambda x: (x + 1).exp(), max_different_graphs=2)
    for rows in (2, 3, 2, 3):
        f(torch.ones(rows, device="xla"))
    with pytest.raises(RuntimeError) as caught:
        f(torch.ones(4, device="xla"))
    assert str(caught.value) == (
        "Maximum number of different graphs allowed per function exceeded: 2\n"
        "Got: [] aten::add, xla_shape=f32[4]{0}, dynamic_dims: ()\n"
        "Expected: [] aten::add, xla_shape=f32[2]{0}, dynamic_dims: ()\n"
    )
    assert f(torch.zeros(3, device="xla")).shape == (3,)  # known graphs still run


def test_a_different_operator_is_named():
    ops = iter([torch.sin, torch.cos])
    f = torch_xla.compile(lambda x: next(ops)(x * 2), max_different_graphs=1)
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    f(x)
    with pytest.raises(RuntimeError, match=r"Got: \[\] aten::cos, .*\nExpected: \[\] aten::sin, "):
        f(x)


def test_a_limit_that_is_none():
    with pytest.raises(ValueError, match="max_different_graphs is 0"):
        torch_xla.compile(step_of, max_different_graphs=0)


def test_an_exception_passes_and_leaves_no_state():
    f = torch_xla.compile(lambda x: x.no_such_attribute, full_graph=True)
    x = torch.ones(2, device="xla")
    with pytest.raises(AttributeError):
        f(x)
    assert x._s.trace.region is None
    assert (x + 1).tolist() == [2, 2]


def test_custom_compile_options_are_part_of_the_program(compile_count):
    x = torch.ones(7, device="xla")
    torch_xla.sync()
    (x + 3).tolist()
    before = compile_count()
    try:
        torch_xla.set_custom_compile_options({"xla_cpu_enable_fast_min_max": True})
        (x + 3).tolist()
        (x + 3).tolist()
        assert compile_count() == before + 1
    finally:
        torch_xla.set_custom_compile_options({})
    (x + 3).tolist()
    assert compile_count() == before + 1
    with pytest.raises(TypeError, match="compile option 'a' has the value"):
        torch_xla.set_custom_compile_options({"a": [1]})


# -- step closures --------------------------------------------------------------------------------


def test_closures_run_at_the_end_of_the_step_in_order():
    seen = []
    x = torch.ones(2, device="xla")
    xm.add_step_closure(lambda t: seen.append(("first", t.sum().item())), (x * 3,))
    xm.add_step_closure(lambda: seen.append("second"))
    assert not seen
    xm.mark_step()
    assert seen == [("first", 6), "second"]
    xm.mark_step()
    assert len(seen) == 2


def test_a_closures_exception_reaches_the_loop():
    def fail():
        raise ValueError("no disk")

    xm.add_step_closure(fail)
    with pytest.raises(ValueError, match="no disk"):
        torch_xla.sync()


def test_asynchronous_closures_run_elsewhere_and_raise_at_the_next_sync():
    threads = []
    xm.add_step_closure(lambda: threads.append(threading.current_thread()), run_async=True)
    torch_xla.sync()
    step_closures.wait()
    assert threads[0] is not threading.current_thread()

    def fail():
        raise ValueError("no disk")

    xm.add_step_closure(fail, run_async=True)
    torch_xla.sync()
    with pytest.raises(RuntimeError, match="run_async=True failed: no disk"):
        step_closures.wait()


# -- eager mode -----------------------------------------------------------------------------------


def test_eager_mode_runs_each_operator():
    assert not experimental.is_eager_mode()
    with experimental.eager_mode_context(True):
        assert experimental.is_eager_mode()
        x = torch.ones(2, 3, device="xla")
        before = runs()
        y = x + 1
        assert runs() == before + 1
        y.mul_(2)
        y[0].zero_()
        first, second = y.split(1)
        model = nn.Linear(3, 2).to("xla")
        model(y).sum().backward()
        assert model.weight.grad._s.buffer is not None
    assert not experimental.is_eager_mode()
    assert (first.tolist(), second.tolist()) == ([[0, 0, 0]], [[4, 4, 4]])
    before = runs()
    z = y + 1  # lazy again, by a handler that was first met in eager mode
    first + 1
    assert runs() == before
    assert z.tolist() == [[1, 1, 1], [5, 5, 5]]


def test_eager_operators_compile_once(compile_count):
    x = torch.ones(11, device="xla")
    with experimental.eager_mode_context(True):
        (x + 2.5).mul_(3.0)
        before = compile_count()
        for value in (3.5, 4.5):
            y = (x + value).mul_(value)
        assert compile_count() == before
    assert y[0].item() == 5.5 * 4.5


def test_compile_inside_eager_mode():
    experimental.eager_mode(True)
    try:
        x = torch.ones(5, device="xla")
        f = experimental.compile(lambda x: (x + 1).exp().sum())
        f(x)
        before = runs()
        f(x)
        assert runs() == before + 1
        assert experimental.is_eager_mode()
    finally:
        experimental.eager_mode(False)


def test_environment_variables(run_python):
    code = """
        import torch, torch_xla
        from torch_xla.experimental import is_eager_mode
        from xla_core.support import counters
        x = torch.arange(4.0, device="xla") + 1.5
        y = (x * x).relu() + torch.rand(4, device="xla") * 0
        torch_xla.sync()
        synced = counters.all_counters().get("OpByOpExecute", 0)
        assert (y + 1 - 1 - x * x).abs().max().item() < 1e-5
        got = counters.all_counters().get("OpByOpExecute", 0) - synced
        print(is_eager_mode(), synced > 3, got > 3)
    """
    assert run_python(code).split() == ["False", "False", "False"]
    assert run_python(code, XLA_USE_EAGER_DEBUG_MODE="1").split() == ["True", "False", "False"]
    assert run_python(code, SYNC_TENSORS_OPBYOP="1").split() == ["False", "True", "False"]
    assert run_python(code, GET_TENSORS_OPBYOP="1").split() == ["False", "False", "True"]


def test_operator_by_operator_trains_the_same(monkeypatch, compile_count):
    def losses():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).to(
            "xla"
        )
        optimizer = torch.optim.Adam(model.parameters())
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4, device="xla")).square().sum()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            found.append(loss.item())
        return found

    expected = losses()
    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    torch.testing.assert_close(losses(), expected)
    before = compile_count(), counters.all_counters()["OpByOpExecute"]
    losses()
    assert compile_count() == before[0]
    assert counters.all_counters()["OpByOpExecute"] > before[1]


@pytest.mark.parametrize("given", [5, "step"])
def test_what_cannot_be_called_is_refused(given):
    with pytest.raises(TypeError, match=r"takes a function or a module, got (int|str)"):
        torch_xla.compile(given)
