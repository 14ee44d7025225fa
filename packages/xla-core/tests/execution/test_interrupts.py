"""Exceptions that come at any bytecode of a step: tensors hold a value they had, and the next step runs."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

import torch_xla
from torch_xla.experimental.scan import scan
from xla_core.api import compile_decorator
from xla_core.compilation import program_table
from xla_core.compilation.staged_executable import StagedExecutable
from xla_core.contract import events
from xla_core.dynamo import compiled_graph
from xla_core.execution import eager_mode, runtime
from xla_core.lowering import compile_settings
from xla_core.testing.interrupts import SOURCES, Again, Interrupt, Interrupted, passed_by


def fresh(device):
    values = {name: torch.arange(4.0) + i for i, name in enumerate(("w", "x", "g", "b", "n"))}
    return {name: value.to(device) for name, value in values.items()}


def statements(t, host):
    """A step of most kinds of writes; what it yields tells a value from what lies between two."""
    t["w"].mul_(0.5)
    yield
    t["w"][1:].add_(t["x"][1:] * 2.5, alpha=1.5)  # through a view, with lifted numbers
    yield
    t["g"].zero_()  # overwritten without being read
    yield
    t["g"].copy_(t["w"] + 1.25)
    yield
    t["b"].copy_(host)
    yield
    t["x"].data = t["x"].data * 0.75 + t["b"]
    yield
    torch._foreach_mul_([t["n"], t["g"]], [0.5, 0.25])
    yield


def run(t, host, end=torch_xla.sync):
    for _ in statements(t, host):
        pass
    end()


def values_held(t, host):
    """For every tensor all the values that a step gives it, computed on the CPU, the old one first."""
    mirror = {name: value.clone() for name, value in t.items()}
    held = {name: [value.clone()] for name, value in mirror.items()}
    for _ in statements(mirror, host):
        for name, value in mirror.items():
            held[name].append(value.clone())
    return held


def read(t):
    return {name: value.detach().cpu() for name, value in t.items()}


def check_recovery(step, t, host, held, where):
    """After an interrupt every tensor has a value that it had, and the next step goes on from there."""
    found = read(t)
    for name, value in found.items():
        assert any(torch.allclose(value, one) for one in held[name]), (where, name, value)
    step(t, host)
    expected = {name: value.clone() for name, value in found.items()}
    for _ in statements(expected, host):
        pass
    for name, value in read(t).items():
        assert torch.allclose(value, expected[name]), (where, name, value)


def check_everywhere(step, make=fresh, lines=False, times=("first", "last"), files=()):
    """Interrupt ``step`` at each place that it passes (in ``files``); returns how many there were."""
    host = torch.tensor([3.0, 1.0, 2.0, 5.0])
    t = make("xla")
    for _ in range(3):
        step(t, host)
    passed = passed_by(lambda: step(t, host), lines)
    fired = 0
    for place in passed.places(times):
        if files and not place[0].co_filename.endswith(files):
            continue
        t = make("xla")
        torch_xla.sync()
        held = values_held(read(t), host)
        try:
            with Interrupt(*place, lines):
                step(t, host)
            continue  # this time the place is not passed as often: caches are full
        except Interrupted as interrupted:
            where = str(interrupted)
        fired += 1
        check_recovery(step, t, host, held, where)
    return fired


def check_twice(step, make=fresh, sources=SOURCES):
    """Interrupt ``step`` at each line, and once more at each bytecode that only runs because of it."""
    host = torch.tensor([3.0, 1.0, 2.0, 5.0])
    t = make("xla")
    for _ in range(3):
        step(t, host)
    passed = passed_by(lambda: step(t, host), lines=True)
    again, fired = Again(sources), 0
    for place in passed.places(("first",)):
        for _ in range(200):  # as often as the way out has bytecodes that no second one came at yet
            t = make("xla")
            torch_xla.sync()
            held = values_held(read(t), host)
            first = Interrupt(*place, True)
            try:
                with again.after(first), first:
                    step(t, host)
            except Interrupted as interrupted:
                where = f"{interrupted.__context__} {interrupted}"
            if not again.where:
                break
            fired += 1
            check_recovery(step, t, host, held, where)
    return fired


def test_a_second_interrupt_on_the_way_out_of_the_first():
    assert check_twice(run) > 20


def test_a_region_interrupted_at_any_bytecode():
    """``torch_xla.compile``: what it changes for its block is as before, the next one runs as a whole."""

    def step(t, host):
        trace = runtime.trace_of(None)
        try:
            with torch_xla.compile(full_graph=True, name="one", custom_compile_options=OPTIONS):
                for _ in statements(t, host):
                    pass
            assert not trace.cur.depth
        finally:
            left = trace.region, trace.graph_name, trace.forbidden, compile_settings.token()
            if not isinstance(sys.exception(), Interrupted):
                assert left == (None, None, None, "")

    with eager_mode.mode(True):
        files = "compile_decorator.py", "compile_settings.py", "eager_mode.py"
        assert check_everywhere(step, times=("first",), files=files) > 300
        assert eager_mode.is_on()
    # not what runs at the end of the block, which is a step like any other
    files = compile_decorator.__file__, compile_settings.__file__
    assert check_twice(step, sources=files) > 20
    assert runtime.trace_of(None).region is None


OPTIONS = {"xla_cpu_enable_fast_math": False}


def test_a_step_interrupted_at_any_bytecode():
    """Recording and syncing; the first time that each bytecode is passed, others by line below."""
    assert check_everywhere(run, times=("first",)) > 1000


def test_reading_interrupted_at_any_line():
    def step(t, host):
        for _ in statements(t, host):
            pass
        t["w"].sum().item()
        t["g"].cpu()

    assert check_everywhere(step, lines=True) > 100


@pytest.mark.parametrize("mode", ["eager", "op by op"])
def test_operators_run_one_by_one_interrupted_at_any_line(mode, monkeypatch):
    if mode == "eager":
        with eager_mode.mode(True):
            assert check_everywhere(run, lines=True) > 100
            assert eager_mode.is_on()
    else:
        monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
        assert check_everywhere(run, lines=True) > 100
    assert not runtime.traces()[0].eager_flush


def test_a_step_in_stages_interrupted_at_any_line(monkeypatch):
    """Its first stage takes memory that the last one gives back."""
    monkeypatch.setenv("XLA_STEP_STAGES", "1")
    monkeypatch.setenv("XLA_OUTLINE_REPEATS", "1")

    def layers(t, _host):
        for _ in range(8):
            for _ in range(8):
                t["w"].mul_(0.5)
                yield
                t["w"].add_(t["x"])
                yield

    monkeypatch.setitem(globals(), "statements", layers)
    assert check_everywhere(run, lines=True, times=("first",)) > 50
    found = [p for p in program_table.all_programs() if isinstance(p.executable, StagedExecutable)]
    assert found


def test_a_compiled_graph_interrupted_at_any_line():
    def model(w, x):
        w.mul_(0.5).add_(x)
        return (w + 1,)

    def graph_statements(t, _host):
        t["b"].copy_(compiled[t["w"].device.type](t["w"], t["x"])[0])
        yield

    compiled = {"cpu": model}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "statements", graph_statements)
        t = fresh("xla")
        graph = fx.symbolic_trace(model)
        compiled["xla"] = compiled_graph.extract_compiled_graph(graph, (t["w"], t["x"]))
        assert check_everywhere(run, lines=True) > 100
        assert check_twice(run) > 20

        def from_the_beginning(t, host):
            compiled["xla"] = compiled_graph.CompiledGraph(graph)
            run(t, host)

        assert check_twice(from_the_beginning) > 50


def test_a_function_of_torch_compile_interrupted_at_any_line():
    def model(w, x, b):
        w.mul_(0.5)
        b.copy_(w + x)

    def compiled_statements(t, _host):
        model(t["w"], t["x"], t["b"]) if t["w"].device.type == "cpu" else compiled(
            t["w"], t["x"], t["b"]
        )
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "statements", compiled_statements)
        compiled = torch.compile(model, backend="openxla", fullgraph=True)
        assert check_everywhere(run, lines=True, times=("first",)) > 50
        assert check_twice(run) > 10


def test_the_recording_of_a_loop_interrupted_at_any_line():
    """A body is recorded while its step waits, which continues afterwards."""

    def loop_statements(t, _host):
        t["w"].mul_(0.5)
        if t["w"].device.type == "xla":
            t["b"].copy_(
                scan(lambda c, x: (c + x, c * 2), t["w"], torch.stack([t["x"], t["g"]]))[0]
            )
        else:
            t["b"].copy_(t["w"] + t["x"] + t["g"])
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "statements", loop_statements)
        assert check_everywhere(run, lines=True) > 100


def train(net, optimizer, inputs):
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()
    torch_xla.sync()


def state(net, optimizer):
    moments = [v for s in optimizer.state.values() for v in s.values()]
    return [v.detach().cpu().clone() for v in (*net.state_dict().values(), *moments)]


def test_training_interrupted_at_any_line_of_recording_and_syncing():
    """Weights and moments are old or new; what comes next is what the CPU makes of them."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).to("xla")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    inputs = torch.randn(5, 3, device="xla")
    for _ in range(3):
        train(net, optimizer, inputs)
    passed = passed_by(lambda: train(net, optimizer, inputs), lines=True)
    for place in passed.places():
        before = state(net, optimizer)
        twin = copy.deepcopy(net.cpu()), inputs.cpu()
        net.to("xla")
        after = _trained_on_cpu(twin, optimizer)
        where = "not passed"
        try:
            with Interrupt(*place, True):
                train(net, optimizer, inputs)
        except Interrupted as interrupted:
            where = str(interrupted)
        for value, old, new in zip(state(net, optimizer), before, after, strict=True):
            held = torch.allclose(value, old, atol=1e-5) or torch.allclose(value, new, atol=1e-5)
            assert held, where
        train(net, optimizer, inputs)


def _trained_on_cpu(twin, optimizer):
    net, inputs = twin
    copied = torch.optim.Adam(net.parameters(), lr=0.1)
    moved = pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), optimizer.state_dict())
    copied.load_state_dict(moved)
    copied.zero_grad()
    net(inputs).square().mean().backward()
    copied.step()
    return state(net, copied)


def test_an_exception_of_a_listener_leaves_the_results_bound():
    t = fresh("xla")
    run(t, torch.ones(4))

    def fail(event):
        raise Interrupted(event)

    held = values_held(read(t), torch.ones(4))
    undo = events.subscribe(events.ProgramExecuted, fail)
    try:
        with pytest.raises(Interrupted):
            run(t, torch.ones(4))
    finally:
        undo()
    for name, value in read(t).items():
        assert torch.allclose(value, held[name][-1])


SIGNALLED = """
    import random, signal, time, traceback, torch, torch_xla
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("xla")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    inputs = torch.randn(16, 4, device="xla")

    def train():
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss

    for _ in range(5):
        began = time.perf_counter()
        train().item()
        took = time.perf_counter() - began
    random.seed(0)
    interrupted = 0
    while interrupted < 200:
        try:
            # Python drops an exception that comes while a callback of the garbage collector runs, and jax has
            # one (jax 0.11): the second signal is for that
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 2 * took), 5)
            while True:
                train()
        except KeyboardInterrupt as interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            interrupted += 1
            if not torch.is_grad_enabled():
                # torch/optim/optimizer.py may be interrupted where it sets the mode back, on the CPU, too
                assert "/torch/optim/" in "".join(traceback.format_tb(interrupt.__traceback__)[-3:])
                torch.set_grad_enabled(True)
        for value in [*net.parameters(), *[v for s in optimizer.state.values() for v in s.values()]]:
            assert torch.isfinite(value.detach().cpu()).all()
        assert train().item() < 10
    print("interrupted", interrupted)
"""


def test_two_hundred_signals_lose_nothing(run_python):
    assert "interrupted 200" in run_python(SIGNALLED)
